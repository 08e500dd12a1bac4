"""The table of the cards that one process had."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.cards import CardRow
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, table
from memprof.units import gib


def render_cards(cards: tuple[CardRow, ...], unit: Unit) -> RenderableType:
    """A row a card; the run fits if all of them do."""
    made = table("cards", ">capacity", ">allocated", ">reserved", ">device used", ">", ruled=True)
    for card in cards:
        name = Text(card.device)
        if card.shown:
            name.append("  <- below", style="bold")
        capacity = "" if card.total_bytes is None else f"{gib(card.total_bytes)} GiB"
        figures = (card.peak_allocated_bytes, card.peak_reserved_bytes, card.device_used_bytes)
        made.add_row(name, capacity, *map(unit.amount, figures), _verdict(card))
    note = f"{unit.name}, at the most. The run fits if all cards do; --card shows another one in full."
    return Group(made, dim(note))


def _verdict(card: CardRow) -> Text:
    if not card.used:
        return Text("not used")
    return Text("full", style="red") if card.fits is False else Text("fits") if card.fits else Text("not known")
