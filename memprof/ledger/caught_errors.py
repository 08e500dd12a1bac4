"""Out-of-memory errors that a program caught: failed allocations after which the program continued."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.ledger.ledger import Ledger
from memprof.trace.events import NONE, EventKind
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class CaughtError:
    """One failed allocation that the program survived."""

    stage: str
    step: int
    num_bytes: int = field(metadata=json_name("bytes"))  # Of the tensor that was requested.
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str | None
    source: str | None
    in_use_bytes: int  # Of allocated blocks at that time.
    event: int = field(default=NONE, metadata=json_name(None))  # NONE in a report that was read from JSON.


def caught_errors(ledger: Ledger) -> list[CaughtError]:
    """Return all caught errors, in the order of the run."""
    trace = ledger.trace
    refused = frozenset(trace.refused) - trace.optional_storages()
    found = []
    for time, (kind, ref) in enumerate(trace.events):
        if kind is EventKind.ALLOC and ref in refused:
            stage, storage = ledger.span_at(time), trace.storages[ref]
            what = (storage.num_bytes, storage.shape, storage.dtype, trace.op(storage))
            where = (trace.module_path(storage), trace.source_line(storage))
            found.append(CaughtError(stage.name, stage.step, *what, *where, ledger.allocated[time], time))
    return found
