"""The unit of a report's tables."""

from __future__ import annotations

from memprof.units import GIB, MIB


class Unit:
    """GiB, or MiB for a run that would be all zeros in GiB."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self._num_bytes = num_bytes

    def amount(self, num_bytes: int, *, sign: bool = False) -> str:
        """`num_bytes` with two decimals, never as minus zero."""
        value = round(num_bytes / self._num_bytes, 2) + 0.0
        return f"{value:+,.2f}" if sign else f"{value:,.2f}"


def unit_for(num_bytes: int) -> Unit:
    """The unit of tables whose largest amount is `num_bytes`."""
    return Unit("GiB", GIB) if num_bytes >= GIB else Unit("MiB", MIB)
