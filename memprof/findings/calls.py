"""Evaluation loops: consecutive calls of a model without a backward pass or optimizer step in between."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from itertools import groupby

from memprof.findings.finding import Context
from memprof.ledger.categories import Category
from memprof.trace.events import Forward, PhaseKind, Trace

_TRAINING = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)


def find_training_events(trace: Trace) -> list[int]:
    """Return the event indices at which backward passes and optimizer steps begin."""
    return [time for time, phase in trace.list_phase_begins() if phase.kind in _TRAINING]


def find_call_loops(
    calls: Iterable[Forward], trace: Trace, is_included: Callable[[Forward], bool]
) -> list[list[Forward]]:
    """Return the loops of those `calls` that `is_included` accepts: consecutive calls of one module, without training
    between them. What one place calls before another one does, as a validation before a test, is a loop of its own."""
    trained_at = find_training_events(trace)
    open_loops: dict[int, list[Forward]] = {}
    loops: list[list[Forward]] = []
    for forward in calls:
        if not is_included(forward):
            open_loops.pop(forward.module, None)
            continue
        loop = open_loops.get(forward.module)
        if loop is None or bisect.bisect(trained_at, loop[-1].begin) != bisect.bisect(trained_at, forward.begin):
            loop = open_loops[forward.module] = []
            loops.append(loop)
        loop.append(forward)
    return [part for loop in loops for part in _split_by_place(loop)]


def _split_by_place(loop: list[Forward]) -> list[list[Forward]]:
    """Return the parts of `loop` that one line of one function's caller calls; `loop` as a whole, if places take
    turns, or one of them calls once."""
    parts = [list(part) for _, part in groupby(loop, lambda call: (call.source, call.caller))]
    places = {(call.source, call.caller) for call in loop}
    are_loops = len(parts) == len(places) and min(map(len, parts)) > 1
    return parts if are_loops else [loop]


def new_storages(context: Context, begin: int, end: int, *, caches: bool = False) -> list[int]:
    """Return the GPU storages that were allocated from event index `begin` until before `end`: those of the KV cache if
    `caches`, else those with neither a role nor a place in the KV cache."""
    trace, births, categories = context.ledger.trace, context.lifetimes.births, context.ledger.categories
    indices = range(
        bisect.bisect_left(births, begin), bisect.bisect_left(births, end)
    )  # storages are in order of birth
    return [
        index
        for index in indices
        if (storage := trace.storages[index]).device == trace.device
        and not storage.hidden
        and caches is (categories[index] is Category.KV_CACHE)
        and (caches or index not in trace.owners)
    ]
