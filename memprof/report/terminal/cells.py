"""Text of table cells in a terminal or on an HTML page: sizes, shapes, source lines. Imports no rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memprof.trace.events import short_source
from memprof.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:  # a report of a run needs neither
    from memprof.report.documents.analysis import BlockRow
    from memprof.report.documents.comparison import TensorGroup, TotalRow

_BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
_RESERVING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
A_BUFFER = "a buffer"
_PUBLIC_NAMES = {"to_copy": ".to()"}
_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("bytes", 1))


class Unit:
    """A unit of memory sizes, such as GiB; `num_bytes` is its size in bytes."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes

    def format(self, num_bytes: int, *, sign: bool = False) -> str:
        """Return `num_bytes` in this unit, with two decimals and, if `sign`, with + or -; never -0.00."""
        value = round(num_bytes / self.num_bytes, 2) + 0.0
        return f"{value:+,.2f}" if sign else f"{value:,.2f}"


def choose_unit(num_bytes: int, *, min_unit_bytes: int = MIB) -> Unit:
    """Return the largest unit (GiB to bytes) that `num_bytes` reaches, but none below `min_unit_bytes`."""
    return next(Unit(name, size) for name, size in _UNITS if num_bytes >= size or size <= min_unit_bytes)


def format_shape(shape: Iterable[int]) -> str:
    """Return a tensor's shape as text, such as 4096x64000."""
    return "x".join(map(str, shape))


def describe_tensor(shape: Sequence[int], dtype: str) -> str:
    """Return shape and dtype of a tensor as text; "a buffer" of bytes in one dimension, as kernels request them."""
    return A_BUFFER if dtype == "uint8" and len(shape) == 1 else f"[{format_shape(shape)}] {dtype}"


def name_operator(op: str) -> str:
    """Return an operator's name without what torch keeps to itself: ".to()" of "aten._to_copy"; "" of what only
    reserves memory for another function, such as "aten.empty" of repeat()."""
    name = op.removeprefix("aten.").lstrip("_")
    return "" if name in _RESERVING else _PUBLIC_NAMES.get(name, name)


def format_seconds(seconds: float, decimals: int = 2) -> str:
    """Return a duration in seconds, or in milliseconds if below one second."""
    return f"{seconds:,.{decimals}f} s" if seconds >= 1 else f"{1000 * seconds:,.{decimals}f} ms"


def join_first(names: list[str], max_names: int) -> str:
    """Return the first `max_names` of `names`, separated by commas, and how many more there are."""
    suffix = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + suffix


def draw_curve(values: Iterable[int], highest: int) -> str:
    """Return one bar character per value, relative to `highest`; any value above 0 gets a visible bar."""
    return "".join(_BAR_CHARACTERS[-(-max(value, 0) * (len(_BAR_CHARACTERS) - 1) // highest)] for value in values)


def format_signed_bytes(num_bytes: int) -> str:
    """Return a difference of bytes as text such as `+1.50 GiB`: with its sign, in a unit that fits its size."""
    return ("+" if num_bytes > 0 else "-" if num_bytes else "") + format_bytes(abs(num_bytes))


def format_source(source: str) -> str:
    """Return `path:line function` with the path shortened to `folder/file.py`; any other string unchanged."""
    head, _, function = source.rpartition(" ")
    return f"{short_source(source)} {function}" if head and ":" in head else source


def format_block_life(block: BlockRow) -> str:
    """Return the indices of the events that allocated and freed a block, such as `12 - 40` or `start - end`."""
    begin = "start" if block.born_event < 0 else f"{block.born_event:,}"
    return f"{begin} - {'end' if block.freed_event is None else f'{block.freed_event:,}'}"


def describe_total(row: TotalRow) -> str:
    """Return how a total of two runs compares: "equal", "within" (the tolerance), "differs", or "not compared"."""
    if not row.compared:
        return f"not compared: {row.why_not}"
    return "equal" if row.difference_bytes == 0 else "within" if row.within else "differs"


def format_tensors(group: TensorGroup) -> str:
    """Return count, shape and dtype of equal tensors; if the shape is unknown, count and bytes of one tensor."""
    tensor = format_bytes(group.num_bytes) if group.shape is None else f"{format_shape(group.shape)} {group.dtype}"
    return f"{group.count} x {tensor}"
