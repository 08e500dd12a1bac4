"""Out-of-memory errors that a program caught: failed allocations after which the program continued."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.ledger.ledger import Ledger
from memprof.trace.events import NONE, EventKind
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class CaughtError:
    """A failed allocation whose error the program caught, so that it continued."""

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


def list_caught_errors(ledger: Ledger) -> list[CaughtError]:
    """Return the out-of-memory errors that the program caught, in the order of the run."""
    trace = ledger.trace
    failed_storages = frozenset(trace.refused) - trace.optional_storages()
    errors = []
    for time, (kind, ref) in enumerate(trace.events):
        if kind is EventKind.ALLOC and ref in failed_storages:
            stage, storage = ledger.span_at(time), trace.storages[ref]
            tensor = (storage.num_bytes, storage.shape, storage.dtype, trace.op(storage))
            origin = (trace.module_path(storage), trace.source_line(storage))
            errors.append(CaughtError(stage.name, stage.step, *tensor, *origin, ledger.allocated[time], time))
    return errors
