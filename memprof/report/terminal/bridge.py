"""The bridge for a terminal: from what tensors asked for to what the card has in use."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.ledger.bridge import Bridge, BridgeMoment, PoolUse
from memprof.ledger.stages import at_stage
from memprof.report.terminal.cells import Unit, some
from memprof.report.terminal.console import dim, heading, indented, table
from memprof.units import format_bytes

MAX_PROCESSES = 5


def render_bridge(bridge: Bridge, unit: Unit) -> RenderableType:
    """A column for the moment at which most is reserved, and one for that at which most is allocated, if it differs."""
    moments = [bridge.peak_reserved]
    if _amounts(bridge.peak_allocated) != _amounts(bridge.peak_reserved):
        moments.append(bridge.peak_allocated)
    heads = ("most reserved", "most allocated")[: len(moments)]
    made = table("|", *(f">{head}" for head in heads), "~ ", drop=("most allocated", " "))
    made.show_header = len(moments) > 1
    made.columns[-1].style = "dim"

    def add(name: str, values: list[int | None], note: str = "", *, total: bool = False) -> None:
        amounts = ["not known" if value is None else unit.amount(value) for value in values]
        made.add_row(name, *amounts, note, style="bold" if total else "")

    def of(attribute: str) -> list[int | None]:
        return [getattr(moment, attribute) for moment in moments]

    first = moments[0]
    add("requested by tensors", of("requested_bytes"))
    add("+ rounding", of("rounding_bytes"), "of blocks")
    add("= allocated", of("allocated_bytes"), "what torch says", total=True)
    add("+ free in segments", of("fragmentation_bytes"), _kept(first.fragmentation_bytes, bridge.cached_bytes(first)))
    if any(moment.given_back_bytes for moment in moments):
        add("+ given back at once", of("given_back_bytes"), "before the request was served")
    add("= reserved", of("reserved_bytes"), "what torch holds", total=True)
    add("+ CUDA context", of("context_bytes"))
    if first.libraries_bytes is not None or first.other_processes_bytes is not None:
        add("+ libraries outside", of("libraries_bytes"), "handles of cuBLAS and cuDNN, NCCL")
        add("+ other processes", of("other_processes_bytes"), _processes(bridge))
    if first.unnamed_bytes is not None:
        add("+ libraries, others", of("unnamed_bytes"), "libraries and other processes, not told apart")
    if bridge.nccl_group_bytes is not None:
        least, most = map(format_bytes, bridge.nccl_group_bytes)
        add("+ NCCL", [None] * len(moments), f"{least} to {most} for each group, where others measured it")
    add("= device used", of("device_used_bytes"), "what nvidia-smi says", total=True)
    where = (f"{head} in {at_stage(moment.stage, moment.step)}" for head, moment in zip(heads, moments, strict=True))
    title = heading(f"From tensors to device used, {unit.name}, ", ", ".join(where))
    parts: list[RenderableType] = [title, indented(made)]
    notes = [f"free: {_free(first)}"] if first.fragmentation_bytes else []
    if bridge.outside_is_unknown:
        nccl = "" if bridge.nccl_group_bytes is None else "NCCL, "
        notes.append(f"not known: libraries outside the allocator, {nccl}other processes")
    parts += [indented(dim("; ".join(notes)))] if notes else []
    return Group(*parts, Text(""))


def _amounts(moment: BridgeMoment) -> tuple[int, ...]:
    return moment.requested_bytes, moment.allocated_bytes, moment.reserved_bytes


def _kept(free: int, cached: int) -> str:
    """What is free where most is reserved: cached for the next step, or never in use."""
    if not cached:
        return "fragmentation"
    return f"{format_bytes(free - cached)} fragmentation, the rest cached" if free > cached else "cached"


def _free(moment: BridgeMoment) -> str:
    """Which segments have what is free."""
    return ", ".join(_pool(pool) for pool in moment.pools if pool.free_bytes)


def _pool(pool: PoolUse) -> str:
    segments = f"{pool.segments:,} {pool.pool} segment{'' if pool.segments == 1 else 's'}"
    back = f" ({format_bytes(pool.releasable_bytes)} of it could be given back)" if pool.releasable_bytes else ""
    return f"{format_bytes(pool.free_bytes)} in {segments}{back}"


def _processes(bridge: Bridge) -> str:
    if not bridge.processes:
        return ""
    largest = sorted(bridge.processes, key=lambda one: -(one.used_bytes or 0))
    named = [
        f"{one.name} ({one.pid}) {'?' if one.used_bytes is None else format_bytes(one.used_bytes)}" for one in largest
    ]
    return some(named, MAX_PROCESSES)
