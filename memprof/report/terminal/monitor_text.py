"""Text of the views of `memprof monitor`: samples as lines, tables and curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.device.gpus import GpuProcess, NvmlGpu
from memprof.monitor.run import MonitorOutcome
from memprof.monitor.sample import MonitorSample, Peaks, WatchedProcess
from memprof.report.terminal.cells import join_some
from memprof.report.terminal.console import dim, table
from memprof.units import format_bytes, gib

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 120  # Samples that a curve may show.
_CURVE = 24
_NARROW = 12  # Columns of a curve in a table.
_AMOUNT = 6
_MIN_NAME = 12
_MAX_GPUS = 4
_MAX_PROCESSES = 3


def sparkline(values: Iterable[int], width: int, highest: int = 0) -> str:
    """Return the last `width` values as bars, from zero to the maximum of these and `highest`."""
    shown = list(values)[-width:]
    top = max([highest, *shown])
    if top <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[(value * (len(_BARS) - 1) + top // 2) // top] for value in shown)


def plain_line(sample: MonitorSample) -> str:
    """Return a sample in one line."""
    parts = [f"{datetime.fromtimestamp(sample.time):%H:%M:%S}"]
    if sample.processes:
        count = len(sample.processes)
        parts.append(f"resident {format_bytes(sample.resident_bytes)} in {count} process{'es' if count > 1 else ''}")
    if sample.allocators:
        parts.append(f"{_amounts(sample, 'allocated')}; {_amounts(sample, 'reserved')}{_retries_text(sample)}")
    parts += [_gpu(sample, gpu) for gpu in sample.gpus]
    return "  ".join(parts)


def summary(outcome: MonitorOutcome) -> str:
    """Return the outcome of a watched command in one line."""
    peaks = outcome.peaks
    line = f"{outcome.command} {outcome.ending} after {_duration(outcome.elapsed)}"
    known = {"allocated": peaks.allocated_bytes, "reserved": peaks.reserved_bytes}
    known["resident"] = peaks.resident_bytes or None
    amounts = [f"{name} {format_bytes(amount)}" for name, amount in known.items() if amount is not None]
    amounts += [f"GPU {index} {format_bytes(used)}" for index, used in sorted(peaks.gpus.items())]
    return f"{line}; peaks: {', '.join(amounts)}" if amounts else line


def _amounts(sample: MonitorSample, name: str) -> str:
    """Return the current amount, and the highest since the last sample."""
    current, highest = sample.total(f"{name}_bytes") or 0, sample.total(f"interval_peak_{name}_bytes") or 0
    return f"{name} {format_bytes(current)}, highest {format_bytes(highest)}"


def _retries_text(sample: MonitorSample) -> str:
    retries, ooms = sample.total("num_alloc_retries"), sample.total("num_ooms")
    text = f"; {retries} retr{'y' if retries == 1 else 'ies'} with an emptied cache" if retries else ""
    return text + (f"; out of memory {ooms} time{'' if ooms == 1 else 's'}" if ooms else "")


def _gpu(sample: MonitorSample, gpu: NvmlGpu) -> str:
    """Return one GPU in a few words: used memory by process, and the GPU's state."""
    if gpu.used_bytes is None or gpu.total_bytes is None:
        return f"GPU {gpu.index} {gpu.name}: memory not known"
    parts = [f"GPU {gpu.index} {gpu.name}: {gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} GiB"]
    if (command := sample.by_command(gpu)) is not None:
        parts.append(f"{gib(command)} by the command")
    parts += _state(gpu)
    watched = {process.pid for process in sample.processes}
    others = [
        f"{process.name} {'?' if process.used_bytes is None else gib(process.used_bytes)}"
        for process in gpu.processes
        if process.pid not in watched
    ]
    if others:
        parts.append(f"{'others: ' if sample.processes else ''}{join_some(others, _MAX_PROCESSES)}")
    return ", ".join(parts)


def _state(gpu: NvmlGpu) -> list[str]:
    amounts = ((gpu.utilisation_percent, "%"), (gpu.temperature_celsius, " °C"), (gpu.power_watts, " W"))
    return [f"{amount:.0f}{unit}" for amount, unit in amounts if amount is not None]


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    long = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{seconds:.1f} s" if seconds < 60 else long


class SampleHistory:
    """The last values of each curve."""

    def __init__(self) -> None:
        self._values: dict[str, deque[int]] = {}

    def add(self, sample: MonitorSample) -> None:
        """Add a sample."""
        values = {f"GPU {gpu.index}": gpu.used_bytes for gpu in sample.gpus}
        values |= {_curve_of(gpu, one): one.used_bytes for gpu in sample.gpus for one in gpu.processes}
        values["allocated"] = sample.total("interval_peak_allocated_bytes")
        values["reserved"] = sample.total("interval_peak_reserved_bytes")
        values["resident"] = sample.resident_bytes if sample.processes else None
        for name, value in values.items():
            if value is not None:
                self._values.setdefault(name, deque(maxlen=_HISTORY)).append(value)

    def curve(self, name: str, highest: int | None = None, width: int = _CURVE) -> str:
        """Return the values as `width` columns of bars."""
        return sparkline(self._values.get(name, ()), width, highest or 0).ljust(width)


def _curve_of(gpu: NvmlGpu, process: GpuProcess) -> str:
    return f"process {process.pid} on {gpu.index}"


def gpus_table(sample: MonitorSample, peaks: Peaks, history: SampleHistory) -> RenderableType:
    """Return a table with a row per GPU, its slices and processes below, and notes on missing readings."""
    made = table(ruled=True, drop=("peak", "state", "total"))
    time = f"{datetime.fromtimestamp(sample.time):%H:%M:%S}  GiB"
    made.add_column(time, no_wrap=True, overflow="ellipsis", min_width=_MIN_NAME)
    for header in ("used", "peak", "total"):
        made.add_column(header, justify="right", no_wrap=True, min_width=_AMOUNT)
    made.add_column("over time", no_wrap=True, min_width=_NARROW)
    made.add_column("state", no_wrap=True)
    for gpu in sample.gpus:
        amounts = (gpu.used_bytes, peaks.gpus.get(gpu.index), gpu.total_bytes)
        curve = history.curve(f"GPU {gpu.index}", gpu.total_bytes, _NARROW)
        made.add_row(f"{gpu.index} {gpu.name}", *map(_cell, amounts), curve, " ".join(_state(gpu)))
        for piece in gpu.slices:
            amounts = (piece.used_bytes, None, piece.total_bytes)
            made.add_row(f"  slice {piece.index} {piece.name}", *map(_cell, amounts), "", "")
        for process in gpu.processes:
            name = dim(f"  {process.name} ({process.pid})")
            curve = history.curve(_curve_of(gpu, process), gpu.total_bytes, _NARROW)
            made.add_row(name, _cell(process.used_bytes, "?"), "", "", dim(curve), "")
    notes = [Text(f"memprof: {note}", style="yellow") for note in sample.notes]
    return Group(made, *notes)


def _cell(amount: int | None, unknown: str = "") -> str:
    return unknown if amount is None else gib(amount)


def footer_lines(sample: MonitorSample, peaks: Peaks, history: SampleHistory) -> list[Text]:
    """Return a sample as a few lines, for below a command's output."""
    lines = []
    if sample.allocators:
        for name, peak in (("allocated", peaks.allocated_bytes), ("reserved", peaks.reserved_bytes)):
            curve = history.curve(name, peaks.reserved_bytes)
            lines.append(Text(f"{curve} {_amounts(sample, name)}, peak {format_bytes(peak or 0)}"))
        if trouble := _retries_text(sample):
            lines.append(Text(f"{'':{_CURVE}} {trouble[2:]}", style="red"))
        several = [process for process in sample.processes if process.allocators]
        lines += map(_process_line, several[:_MAX_PROCESSES] if len(several) > 1 else ())
        if len(several) > _MAX_PROCESSES:
            lines.append(dim(f"{'':{_CURVE}} and {len(several) - _MAX_PROCESSES} more processes"))
    count = len(sample.processes)
    resident = f"resident {format_bytes(sample.resident_bytes)} in {count} process{'' if count == 1 else 'es'}"
    resident += f", peak {format_bytes(peaks.resident_bytes)}; {_duration(sample.elapsed)}"
    lines.append(Text(f"{history.curve('resident')} {resident}"))
    curves = [history.curve(f"GPU {gpu.index}", gpu.total_bytes) for gpu in sample.gpus]
    lines += [Text(f"{curve} {_gpu(sample, gpu)}") for curve, gpu in zip(curves, sample.gpus, strict=True)]
    del lines[len(lines) - max(0, len(sample.gpus) - _MAX_GPUS) :]
    if len(sample.gpus) > _MAX_GPUS:
        lines.append(Text(f"{'':{_CURVE}} and {len(sample.gpus) - _MAX_GPUS} more GPUs"))
    if sample.notes:
        more = f" (and {len(sample.notes) - 1} more)" if len(sample.notes) > 1 else ""
        lines.append(Text(f"memprof: {sample.notes[0]}{more}", style="yellow"))
    return lines


def _process_line(process: WatchedProcess) -> Text:
    rank = "" if process.rank is None else f"rank {process.rank}, "
    amounts = "; ".join(
        f"cuda:{a.device} allocated {format_bytes(a.allocated_bytes)}, peak {format_bytes(a.max_allocated_bytes)}"
        for a in process.allocators
    )
    return dim(f"{'':{_CURVE}} {rank}{process.name} ({process.pid}): {amounts}")
