"""Copies of a model's state that a program keeps for later: its best weights so far, those that it began with."""

from __future__ import annotations

from bisect import bisect_right

from memprof.findings.finding import Context, cache_per_context
from memprof.ledger.weight_copies import find_weight_copies
from memprof.trace.events import PhaseKind


@cache_per_context
def find_cloned_weights(context: Context) -> frozenset[int]:
    """Return the copies of weights, and of states made with them, that the program's own lines have cloned."""
    trace = context.ledger.trace
    copies = find_weight_copies(trace, context.lifetimes.deaths)
    return frozenset(index for index in copies if trace.op(trace.storages[index]) == "aten.clone")


@cache_per_context
def find_snapshots(context: Context) -> frozenset[int]:
    """Return the copies of a `state_dict` without which the program has trained on, for a step at least.

    An average of weights is used after each step: one that was made before the first may still wait for its end.
    """
    return find_unread_snapshots(context) | find_reread_snapshots(context)


@cache_per_context
def find_unread_snapshots(context: Context) -> frozenset[int]:
    """Return the snapshots that were not used since they were made; the step may be one before."""
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    begins = [time for time, _ in context.phases]
    trained_on = _find_training(context, 0)
    return frozenset(
        index
        for index in _find_state_copies(context)
        if bisect_right(begins, births[index]) == bisect_right(begins, trace.last_uses[index] - 1)
        and deaths[index] > trained_on
    )


@cache_per_context
def find_reread_snapshots(context: Context) -> frozenset[int]:
    """Return the snapshots that were used again after a step without, in which something was seen to hold them."""
    trace = context.ledger.trace
    held = {
        index
        for holder in trace.idle_holders
        if _find_training(context, holder.event) < holder.unused_until
        for index in holder.storages
    }
    return _find_state_copies(context) & held - find_unread_snapshots(context)


@cache_per_context
def _find_state_copies(context: Context) -> frozenset[int]:
    """Return the cloned weights of lines that copied storages, as copy.deepcopy does of a `state_dict`: they are flat.

    A copy of a model may be an average of weights that waits for its next update.
    """
    trace, copies = context.ledger.trace, find_cloned_weights(context)
    of_models = {trace.storages[index].source for index in copies if len(trace.storages[index].shape) > 1}
    return frozenset(index for index in copies if trace.storages[index].source not in of_models)


def _find_training(context: Context, event: int) -> int:
    """Return the event at which a phase that computes begins after the first optimizer's step from `event` on; if none
    does, the number of events."""
    num_events = len(context.ledger.trace.events)
    steps = (time for time, phase in context.phases if time >= event and phase.kind is PhaseKind.OPTIMIZER_STEP)
    step = next(steps, num_events)
    return next((time for time, phase in context.phases if time > step and phase.kind.computes), num_events)
