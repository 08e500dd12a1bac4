"""The cards of a run that had several in one process: a row each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardRow:
    """One of them; sizes are bytes."""

    device: str  # As the program says it: `cuda:1`.
    used: bool  # Whether it has a CUDA context: a card that nothing was asked of has none.
    total_bytes: int | None
    context_bytes: int
    peak_allocated_bytes: int
    peak_stage: str
    peak_reserved_bytes: int
    device_used_bytes: int  # Reserved and the CUDA context, at the most.
    required_bytes: int  # So that nothing is ever refused there.
    fits: bool | None  # As in the verdict.
    decides: bool  # Whether the verdict is about this card: the first that is full, or else the fullest.
    shown: bool  # Whether the rest of the report is about this card.
