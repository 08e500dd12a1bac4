"""The table of the ranks that ran together; those that are alike are one row."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.ledger.stages import at_stage
from memprof.report.documents.ranks import RankRow
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, table
from memprof.units import spell_numbers


def render_ranks(ranks: tuple[RankRow, ...], unit: Unit, *, on_cpu: bool = False) -> RenderableType:
    """A row for each kind of rank; the run fits if all of them do. On a CPU nothing is reserved, and nothing fits."""
    of_card = () if on_cpu else (">reserved", ">device used")
    made = table("ranks", ">allocated", "in", *of_card, ">", ruled=True)
    kinds: dict[int, list[RankRow]] = {}
    for row in ranks:
        kinds.setdefault(row.rank if row.like is None else row.like, []).append(row)
    for rows in kinds.values():
        first = rows[0]
        stands_for = range(first.alike[0], first.alike[1] + 1) if first.alike else (row.rank for row in rows)
        name = Text(spell_numbers(stands_for))
        if shown := [row.rank for row in rows if row.shown]:
            name.append(
                f"  <- {shown[0]} below" if len(rows) > 1 or len(set(first.alike)) > 1 else "  <- below", style="bold"
            )
        figures = [unit.amount(one) for one in (first.peak_reserved_bytes, first.device_used_bytes)] if of_card else []
        where = at_stage(first.peak_stage, first.peak_step) if first.peak_stage else ""
        made.add_row(name, unit.amount(first.peak_allocated_bytes), where, *figures, _verdict(first, on_cpu))
    alike = [f"{spell_numbers(row.rank for row in rows)} are" for rows in kinds.values() if len(rows) > 1]
    said = f"Ranks {', '.join(alike)} equal to the byte. ".replace(" are,", ",") if alike else ""
    if ranks[0].alike:
        said = "Ranks of one row do the same. "
    more = "; --rank shows another one in full" if len(kinds) > 1 else ""
    fits = "" if on_cpu else f"The run fits if all ranks do{more}."
    note = f"{unit.name}, at the most. {said}{fits}".rstrip()
    return Group(made, dim(note))


_ENDED = {
    "error": "failed",
    "not simulated": "stopped",
    "another rank": "stopped with others",
    "interrupted": "interrupted",
    "timeout": "timeout",
}


def _verdict(row: RankRow, on_cpu: bool) -> Text:
    if on_cpu and row.fits:
        return Text()
    if row.fits is None:
        return Text(_ENDED.get(row.ended, "not known"), style="yellow")
    return Text("fits") if row.fits else Text("full", style="red")
