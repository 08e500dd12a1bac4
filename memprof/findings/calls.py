"""Calls of a model one after the other, without a backward between them: an evaluation loop, or what may become one."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from memprof.findings.finding import Context
from memprof.ledger.categories import Category
from memprof.trace.events import Forward, PhaseKind, Trace

_TRAINING = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)


def training_times(trace: Trace) -> list[int]:
    """The events at which a backward or an optimizer's step begins."""
    return [time for time, phase in trace.begun() if phase.kind in _TRAINING]


def loops(trace: Trace, wanted: Callable[[Forward], bool]) -> list[list[Forward]]:
    """Calls of one module in a row that are `wanted`; a backward or an optimizer's step ends the row, calls of other
    modules do not."""
    trained = training_times(trace)
    open_loops: dict[int, list[Forward]] = {}
    result: list[list[Forward]] = []
    for forward in trace.forwards:
        if not wanted(forward):
            open_loops.pop(forward.module, None)
            continue
        loop = open_loops.get(forward.module)
        if loop is None or bisect.bisect(trained, loop[-1].begin) != bisect.bisect(trained, forward.begin):
            loop = open_loops[forward.module] = []
            result.append(loop)
        loop.append(forward)
    return result


def made_in(context: Context, begin: int, end: int) -> list[int]:
    """Storages on the card that were made from `begin` to before `end`, without a role and no KV cache."""
    ledger = context.ledger
    return [
        index
        for index in _made_on_card(context, begin, end)
        if index not in ledger.trace.owners and ledger.categories[index] is not Category.KV_CACHE
    ]


def caches_of(context: Context, begin: int, end: int) -> list[int]:
    """Keys and values on the card that were made from `begin` to before `end`."""
    categories = context.ledger.categories
    return [index for index in _made_on_card(context, begin, end) if categories[index] is Category.KV_CACHE]


def _made_on_card(context: Context, begin: int, end: int) -> list[int]:
    trace, births = context.ledger.trace, context.lives.births
    return [
        index
        for index, storage in enumerate(trace.storages)
        if begin <= births[index] < end and storage.device == trace.device and not storage.hidden
    ]
