"""The table of the streams that a run took memory on."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.ledger.streams import StreamMemory
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, heading, indented, table
from memprof.units import format_bytes


def render_streams(found: StreamMemory, unit: Unit) -> RenderableType:
    """A row a stream, and both bounds of what is reserved where they differ."""
    waits = any(share.waiting_bytes for share in found.streams)
    made = table("|stream", ">reserved", ">allocated", *([">waiting"] * waits), ">free")
    for share in found.streams:
        figures = [share.reserved_bytes, share.allocated_bytes, *([share.waiting_bytes] * waits), share.free_bytes]
        made.add_row(str(share.stream) if share.stream else "default", *map(unit.amount, figures))
    notes = [f"On one stream the run would reserve {format_bytes(found.one_stream_bytes)} at most."]
    if found.soonest_bytes is not None and found.latest_bytes is not None:
        bounds = found.soonest_bytes, found.reserved_bytes, found.latest_bytes
        if len(set(bounds)) > 1:
            soonest, rule, latest = map(format_bytes, bounds)
            notes.append(
                f"What streams lend each other decides it: {rule} by memprof's rule, {soonest} if it is free at once, "
                f"{latest} if only once the host has waited."
            )
    title = heading("By stream, where most is reserved, ", unit.name)
    return Group(title, indented(made), *(indented(dim(note)) for note in notes), Text(""))
