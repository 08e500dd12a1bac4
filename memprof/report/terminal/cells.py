"""Cells of tables in a terminal or on a page, as plain text: sizes, shapes, lines. Needs no rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memprof.trace.events import short_source
from memprof.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:  # a report of a run needs neither
    from memprof.report.documents.analysis import BlockRow
    from memprof.report.documents.comparison import TensorSide, TotalRow

_BARS = " ▁▂▃▄▅▆▇█"
_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("bytes", 1))


class Unit:
    """The unit of a table's sizes, whose name is in the table's header."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes

    def amount(self, num_bytes: int, *, sign: bool = False) -> str:
        """Return `num_bytes` with two decimals, never as minus zero."""
        value = round(num_bytes / self.num_bytes, 2) + 0.0
        return f"{value:+,.2f}" if sign else f"{value:,.2f}"


def unit_for(num_bytes: int, *, smallest: int = MIB) -> Unit:
    """Return the unit of a table whose largest amount is `num_bytes`: GiB, or less where GiB would be all zeros."""
    return next(Unit(name, size) for name, size in _UNITS if num_bytes >= size or size <= smallest)


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as in 4096x64000."""
    return "x".join(map(str, shape))


def join_some(names: list[str], most: int) -> str:
    """Return the first `most` of `names`, and the number of the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def curve(values: Iterable[int], highest: int) -> str:
    """Return a bar for each value, relative to `highest`; any value above 0 gets a visible bar."""
    return "".join(_BARS[-(-max(value, 0) * (len(_BARS) - 1) // highest)] for value in values)


def signed_bytes(num_bytes: int) -> str:
    """Return a difference in a unit of its size: a difference is never shown as 0."""
    return ("+" if num_bytes > 0 else "-" if num_bytes else "") + format_bytes(abs(num_bytes))


def source_text(source: str) -> str:
    """Return `folder/file.py:line function` of a source; another text is returned unchanged."""
    head, _, function = source.rpartition(" ")
    return f"{short_source(source)} {function}" if head and ":" in head else source


def block_life(block: BlockRow) -> str:
    """Return the events between which a block was live."""
    born = "start" if block.born_event < 0 else f"{block.born_event:,}"
    return f"{born} - {'end' if block.freed_event is None else f'{block.freed_event:,}'}"


def total_verdict(row: TotalRow) -> str:
    """Return the result of comparing a total of two runs."""
    if not row.compared:
        return f"not compared: {row.why_not}"
    return "equal" if row.difference_bytes == 0 else "within" if row.within else "differs"


def tensor_text(side: TensorSide) -> str:
    """Return count and shape of equal tensors; without a shape the bytes of one tensor."""
    what = format_bytes(side.num_bytes) if side.shape is None else f"{shape_text(side.shape)} {side.dtype}"
    return f"{side.count} x {what}"
