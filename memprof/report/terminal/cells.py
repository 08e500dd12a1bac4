"""What stands in a cell, as plain words: sizes in one unit, a stage with its step, a shape. Needs no rich."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.units import GIB, KIB, MIB

_BARS = " ▁▂▃▄▅▆▇█"
_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("bytes", 1))


class Unit:
    """The unit of a table's sizes; its header names it."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes

    def amount(self, num_bytes: int, *, sign: bool = False) -> str:
        """`num_bytes` with two decimals, never as minus zero."""
        value = round(num_bytes / self.num_bytes, 2) + 0.0
        return f"{value:+,.2f}" if sign else f"{value:,.2f}"


def unit_for(num_bytes: int, *, smallest: int = MIB) -> Unit:
    """The unit of a table whose largest amount is `num_bytes`: GiB, or less for what would be all zeros in GiB."""
    return next(Unit(name, size) for name, size in _UNITS if num_bytes >= size or size <= smallest)


def shape_text(shape: Iterable[int]) -> str:
    """Such as 4096x64000."""
    return "x".join(map(str, shape))


def some(names: list[str], most: int) -> str:
    """The first `most` of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def curve(values: Iterable[int], highest: int) -> str:
    """A bar each, of the height that it has of `highest`; anything above nothing is seen."""
    return "".join(_BARS[-(-max(value, 0) * (len(_BARS) - 1) // highest)] for value in values)
