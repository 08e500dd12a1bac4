"""Out-of-memory errors that a program caught: what it asked the card for, did not get, and went on without."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.ledger.ledger import Ledger
from memprof.ledger.stages import Span
from memprof.trace.events import EventKind


@dataclass(frozen=True, slots=True)
class CaughtError:
    """One request that the card refused while the program ran."""

    event: int
    stage: Span
    storage: int
    """What was asked for."""
    in_use_bytes: int
    """Of blocks handed out then."""


def caught_errors(ledger: Ledger) -> list[CaughtError]:
    """All of them, in the order of the run."""
    trace = ledger.trace
    refused = frozenset(trace.refused)
    if not refused:
        return []
    return [
        CaughtError(time, ledger.span_at(time), ref, ledger.allocated[time])
        for time, (kind, ref) in enumerate(trace.events)
        if kind is EventKind.ALLOC and ref in refused
    ]
