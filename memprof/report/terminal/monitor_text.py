"""Text of the samples of `memprof monitor`: lines, tables and curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.device.gpus import GpuProcess, NvmlGpu
from memprof.monitor.run import MonitorOutcome
from memprof.monitor.sample import MonitorSample, Peaks, WatchedProcess
from memprof.report.terminal.cells import join_first
from memprof.report.terminal.console import dim, make_table
from memprof.units import format_bytes, gib

_BARS = "▁▂▃▄▅▆▇█"
_MAX_SAMPLES = 120  # Samples in the history of a curve.
_CURVE_WIDTH = 24
_TABLE_CURVE_WIDTH = 12  # Columns of a curve in a table.
_AMOUNT_WIDTH = 6
_MIN_NAME_WIDTH = 12
_MAX_GPUS = 4
_MAX_PROCESSES = 3


def draw_sparkline(values: Iterable[int], width: int, highest: int = 0) -> str:
    """Return a bar character for each of the last `width` values, scaled to their maximum or `highest` if larger."""
    last_values = list(values)[-width:]
    scale_max = max([highest, *last_values])
    if scale_max <= 0:
        return _BARS[0] * len(last_values)
    return "".join(_BARS[(value * (len(_BARS) - 1) + scale_max // 2) // scale_max] for value in last_values)


def format_sample(sample: MonitorSample) -> str:
    """Return a sample in one line."""
    parts = [f"{datetime.fromtimestamp(sample.time):%H:%M:%S}"]
    if sample.processes:
        count = len(sample.processes)
        parts.append(f"resident {format_bytes(sample.resident_bytes)} in {count} process{'es' if count > 1 else ''}")
    if sample.allocators:
        parts.append(
            f"{_format_bytes(sample, 'allocated')}; {_format_bytes(sample, 'reserved')}{_format_retries(sample)}"
        )
    parts += [_format_gpu(sample, gpu) for gpu in sample.gpus]
    return "  ".join(parts)


def format_outcome(outcome: MonitorOutcome) -> str:
    """Return the outcome of a watched command in one line."""
    peaks = outcome.peaks
    line = f"{outcome.command} {outcome.ending} after {_format_duration(outcome.elapsed)}"
    peak_bytes = {"allocated": peaks.allocated_bytes, "reserved": peaks.reserved_bytes}
    peak_bytes["resident"] = peaks.resident_bytes or None
    amounts = [f"{name} {format_bytes(amount)}" for name, amount in peak_bytes.items() if amount is not None]
    amounts += [f"GPU {index} {format_bytes(used)}" for index, used in sorted(peaks.gpus.items())]
    return f"{line}; peaks: {', '.join(amounts)}" if amounts else line


def _format_bytes(sample: MonitorSample, name: str) -> str:
    """Return current `name` ("allocated" or "reserved") bytes of torch, and their maximum since the last sample."""
    current, highest = sample.total(f"{name}_bytes") or 0, sample.total(f"interval_peak_{name}_bytes") or 0
    return f"{name} {format_bytes(current)}, highest {format_bytes(highest)}"


def _format_retries(sample: MonitorSample) -> str:
    retries, ooms = sample.total("num_alloc_retries"), sample.total("num_ooms")
    text = f"; {retries} retr{'y' if retries == 1 else 'ies'} with an emptied cache" if retries else ""
    return text + (f"; out of memory {ooms} time{'' if ooms == 1 else 's'}" if ooms else "")


def _format_gpu(sample: MonitorSample, gpu: NvmlGpu) -> str:
    """Return used memory, processes, utilisation, temperature and power of a GPU in one line."""
    if gpu.used_bytes is None or gpu.total_bytes is None:
        return f"GPU {gpu.index} {gpu.name}: memory not known"
    parts = [f"GPU {gpu.index} {gpu.name}: {gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} GiB"]
    if (command_bytes := sample.command_bytes(gpu)) is not None:
        parts.append(f"{gib(command_bytes)} by the command")
    parts += _format_gpu_state(gpu)
    watched_pids = {process.pid for process in sample.processes}
    other_processes = [
        f"{process.name} {'?' if process.used_bytes is None else gib(process.used_bytes)}"
        for process in gpu.processes
        if process.pid not in watched_pids
    ]
    if other_processes:
        parts.append(f"{'others: ' if sample.processes else ''}{join_first(other_processes, _MAX_PROCESSES)}")
    return ", ".join(parts)


def _format_gpu_state(gpu: NvmlGpu) -> list[str]:
    amounts = ((gpu.utilisation_percent, "%"), (gpu.temperature_celsius, " °C"), (gpu.power_watts, " W"))
    return [f"{amount:.0f}{unit}" for amount, unit in amounts if amount is not None]


def _format_duration(seconds: float) -> str:
    hours, remainder = divmod(int(seconds), 3600)
    minutes, remainder = divmod(remainder, 60)
    clock_text = f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
    return f"{seconds:.1f} s" if seconds < 60 else clock_text


class SampleHistory:
    """The last samples of memory in bytes: of each GPU and process, and of torch's allocators."""

    def __init__(self) -> None:
        self._values: dict[str, deque[int]] = {}

    def add(self, sample: MonitorSample) -> None:
        """Append the values of `sample`."""
        values = {f"GPU {gpu.index}": gpu.used_bytes for gpu in sample.gpus}
        values |= {_name_process_curve(gpu, p): p.used_bytes for gpu in sample.gpus for p in gpu.processes}
        values["allocated"] = sample.total("interval_peak_allocated_bytes")
        values["reserved"] = sample.total("interval_peak_reserved_bytes")
        values["resident"] = sample.resident_bytes if sample.processes else None
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, deque(maxlen=_MAX_SAMPLES)).append(value)

    def draw_curve(self, name: str, highest: int | None = None, width: int = _CURVE_WIDTH) -> str:
        """Return the values of `name` as `width` bar characters, scaled to their maximum, or to `highest` if larger."""
        return draw_sparkline(self._values.get(name, ()), width, highest or 0).ljust(width)


def _name_process_curve(gpu: NvmlGpu, process: GpuProcess) -> str:
    return f"process {process.pid} on {gpu.index}"


def render_gpus_table(sample: MonitorSample, peaks: Peaks, history: SampleHistory) -> RenderableType:
    """Return a table with a row per GPU and rows for its MIG slices and processes, and notes on missing values."""
    table = make_table(ruled=True, optional=("peak", "state", "total"))
    time = f"{datetime.fromtimestamp(sample.time):%H:%M:%S}  GiB"
    table.add_column(time, no_wrap=True, overflow="ellipsis", min_width=_MIN_NAME_WIDTH)
    for header in ("used", "peak", "total"):
        table.add_column(header, justify="right", no_wrap=True, min_width=_AMOUNT_WIDTH)
    table.add_column("over time", no_wrap=True, min_width=_TABLE_CURVE_WIDTH)
    table.add_column("state", no_wrap=True)
    for gpu in sample.gpus:
        amounts = (gpu.used_bytes, peaks.gpus.get(gpu.index), gpu.total_bytes)
        curve = history.draw_curve(f"GPU {gpu.index}", gpu.total_bytes, _TABLE_CURVE_WIDTH)
        table.add_row(f"{gpu.index} {gpu.name}", *map(_format_gib, amounts), curve, " ".join(_format_gpu_state(gpu)))
        for mig_slice in gpu.slices:
            amounts = (mig_slice.used_bytes, None, mig_slice.total_bytes)
            table.add_row(f"  slice {mig_slice.index} {mig_slice.name}", *map(_format_gib, amounts), "", "")
        for process in gpu.processes:
            name = dim(f"  {process.name} ({process.pid})")
            curve = history.draw_curve(_name_process_curve(gpu, process), gpu.total_bytes, _TABLE_CURVE_WIDTH)
            table.add_row(name, _format_gib(process.used_bytes, "?"), "", "", dim(curve), "")
    notes = [Text(f"memprof: {note}", style="yellow") for note in sample.notes]
    return Group(table, *notes)


def _format_gib(num_bytes: int | None, unknown_text: str = "") -> str:
    return unknown_text if num_bytes is None else gib(num_bytes)


def render_footer(sample: MonitorSample, peaks: Peaks, history: SampleHistory) -> list[Text]:
    """Return the lines of the footer that shows a sample below a command's output."""
    lines = []
    if sample.allocators:
        for name, peak in (("allocated", peaks.allocated_bytes), ("reserved", peaks.reserved_bytes)):
            curve = history.draw_curve(name, peaks.reserved_bytes)
            lines.append(Text(f"{curve} {_format_bytes(sample, name)}, peak {format_bytes(peak or 0)}"))
        if retries_text := _format_retries(sample):
            lines.append(Text(f"{'':{_CURVE_WIDTH}} {retries_text[2:]}", style="red"))
        reporting = [process for process in sample.processes if process.allocators]
        lines += map(_render_process, reporting[:_MAX_PROCESSES] if len(reporting) > 1 else ())
        if len(reporting) > _MAX_PROCESSES:
            lines.append(dim(f"{'':{_CURVE_WIDTH}} and {len(reporting) - _MAX_PROCESSES} more processes"))
    count = len(sample.processes)
    resident = f"resident {format_bytes(sample.resident_bytes)} in {count} process{'' if count == 1 else 'es'}"
    resident += f", peak {format_bytes(peaks.resident_bytes)}; {_format_duration(sample.elapsed)}"
    lines.append(Text(f"{history.draw_curve('resident')} {resident}"))
    curves = [history.draw_curve(f"GPU {gpu.index}", gpu.total_bytes) for gpu in sample.gpus]
    lines += [Text(f"{curve} {_format_gpu(sample, gpu)}") for curve, gpu in zip(curves, sample.gpus, strict=True)]
    del lines[len(lines) - max(0, len(sample.gpus) - _MAX_GPUS) :]
    if len(sample.gpus) > _MAX_GPUS:
        lines.append(Text(f"{'':{_CURVE_WIDTH}} and {len(sample.gpus) - _MAX_GPUS} more GPUs"))
    if sample.notes:
        more_notes = f" (and {len(sample.notes) - 1} more)" if len(sample.notes) > 1 else ""
        lines.append(Text(f"memprof: {sample.notes[0]}{more_notes}", style="yellow"))
    return lines


def _render_process(process: WatchedProcess) -> Text:
    rank = "" if process.rank is None else f"rank {process.rank}, "
    amounts = "; ".join(
        f"cuda:{a.device} allocated {format_bytes(a.allocated_bytes)}, peak {format_bytes(a.max_allocated_bytes)}"
        for a in process.allocators
    )
    return dim(f"{'':{_CURVE_WIDTH}} {rank}{process.name} ({process.pid}): {amounts}")
