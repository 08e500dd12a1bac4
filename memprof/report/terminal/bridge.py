"""Terminal tables of the bridge (from bytes requested by tensors to device memory used) and of CUDA streams."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.ledger.bridge import Bridge, PoolUse
from memprof.ledger.streams import StreamMemory
from memprof.report.terminal.cells import Unit, join_first
from memprof.report.terminal.console import dim, indent, make_heading, make_table
from memprof.report.terminal.stage_names import describe_stage
from memprof.trace.facts import DeviceFacts
from memprof.units import format_bytes

MAX_PROCESSES = 5


def render_bridge(bridge: Bridge, unit: Unit, device: DeviceFacts) -> RenderableType:
    """Return the bridge of a run on `device` as a table: a column for the reserved peak, and one for the allocated peak
    if it differs."""
    amounts = ("requested_bytes", "allocated_bytes", "reserved_bytes")
    first, second = bridge.peak_reserved, bridge.peak_allocated
    moments = [first, second] if any(getattr(first, name) != getattr(second, name) for name in amounts) else [first]
    titles = ("most reserved", "most allocated")[: len(moments)]
    table = make_table("|", *(f">{title}" for title in titles), "~ ", optional=("most allocated", " "))
    table.show_header = len(moments) > 1
    table.columns[-1].style = "dim"

    def add(name: str, attribute: str = "", note: str = "", *, total: bool = False) -> None:
        values = [getattr(moment, attribute) if attribute else None for moment in moments]
        cells = ["not known" if value is None else unit.format(value) for value in values]
        table.add_row(name, *cells, note, style="bold" if total else "")

    add("requested by tensors", "requested_bytes")
    add("+ rounding", "rounding_bytes", "of blocks")
    add("= allocated", "allocated_bytes", "what torch says", total=True)
    free_note = _name_free_bytes(first.fragmentation_bytes, bridge.cached_bytes(first))
    add("+ free in segments", "fragmentation_bytes", free_note)
    if any(moment.released_bytes for moment in moments):
        add("+ released at once", "released_bytes", "before the request was served")
    add("= reserved", "reserved_bytes", "what torch holds", total=True)
    if device.has_cuda_context:
        add("+ CUDA context", "context_bytes")
    if first.libraries_bytes is not None or first.other_processes_bytes is not None:
        add("+ libraries outside", "libraries_bytes", "handles of cuBLAS and cuDNN, NCCL")
        add("+ other processes", "other_processes_bytes", _format_processes(bridge))
    if first.unattributed_bytes is not None:
        add("+ libraries, others", "unattributed_bytes", "libraries and other processes, not told apart")
    if bridge.nccl_group_bytes is not None:
        min_bytes, max_bytes = map(format_bytes, bridge.nccl_group_bytes)
        add("+ NCCL", note=f"{min_bytes} to {max_bytes} for each group, where others measured it")
    add("= device used", "device_used_bytes", "what nvidia-smi says" * device.has_cuda_context, total=True)
    places = (f"{title} in {describe_stage(m.stage, m.step)}" for title, m in zip(titles, moments, strict=True))
    title = make_heading(f"From tensors to device used, {unit.name}, ", ", ".join(places))
    parts: list[RenderableType] = [title, indent(table)]
    free_text = ", ".join(_format_pool(pool) for pool in first.pools if pool.free_bytes)
    notes = [f"free: {free_text}"] if first.fragmentation_bytes else []
    if bridge.is_outside_unknown:
        nccl = "" if bridge.nccl_group_bytes is None else "NCCL, "
        notes.append(f"not known: libraries outside the allocator, {nccl}other processes")
    return Group(*parts, *([indent(dim("; ".join(notes)))] if notes else []), Text(""))


def _name_free_bytes(free_bytes: int, cached_bytes: int) -> str:
    """Return the words for free bytes in segments: "cached" (reusable by the next step), "fragmentation", or both."""
    if not 0 < cached_bytes < free_bytes:
        return "cached" if cached_bytes else "fragmentation"
    return f"{format_bytes(free_bytes - cached_bytes)} fragmentation, the rest cached"


def _format_pool(pool: PoolUse) -> str:
    segments = f"{pool.segments:,} {pool.pool} segment{'' if pool.segments == 1 else 's'}"
    note = f" ({format_bytes(pool.releasable_bytes)} of it could be released)" if pool.releasable_bytes else ""
    return f"{format_bytes(pool.free_bytes)} in {segments}{note}"


def _format_processes(bridge: Bridge) -> str:
    largest = sorted(bridge.processes or (), key=lambda process: -(process.used_bytes or 0))
    sizes = ("?" if process.used_bytes is None else format_bytes(process.used_bytes) for process in largest)
    names = [f"{process.name} ({process.pid}) {size}" for process, size in zip(largest, sizes, strict=True)]
    return join_first(names, MAX_PROCESSES)


def render_streams(memory: StreamMemory, unit: Unit) -> RenderableType:
    """Return the memory of each CUDA stream as a table, and the bounds of the reserved bytes if they differ."""
    has_waiting = any(share.waiting_bytes for share in memory.streams)
    table = make_table("|stream", ">reserved", ">allocated", *([">waiting"] * has_waiting), ">free")
    for share in memory.streams:
        sizes = [share.reserved_bytes, share.allocated_bytes, *([share.waiting_bytes] * has_waiting), share.free_bytes]
        table.add_row(str(share.stream) if share.stream else "default", *map(unit.format, sizes))
    notes = [f"On one stream the run would reserve {format_bytes(memory.single_stream_bytes)} at most."]
    if memory.lower_bound_bytes is not None and memory.upper_bound_bytes is not None:
        bounds = memory.lower_bound_bytes, memory.reserved_bytes, memory.upper_bound_bytes
        if len(set(bounds)) > 1:
            lower, rule, upper = map(format_bytes, bounds)
            notes.append(
                f"What streams lend each other decides it: {rule} by memprof's rule, {lower} if it is free at once, "
                f"{upper} if only once the host has waited."
            )
    title = make_heading("By stream, where most is reserved, ", unit.name)
    return Group(title, indent(table), *(indent(dim(note)) for note in notes), Text(""))
