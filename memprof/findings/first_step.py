"""Bytes of the first optimizer step, where memory ran out before its end: gradients and state that still come."""

from __future__ import annotations

from memprof.findings.finding import Context, cache_per_context
from memprof.ledger.ledger import find_live_storages
from memprof.trace.events import NONE, FirstStep, Role, Trace

_HELD = (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE)


def compute_first_step_bytes(context: Context, changed: Trace) -> int:
    """Return the least that the first optimizer step needs if the storages of the run have the sizes of those of
    `changed`: parameters, their gradients and the optimizer's state; 0 if no such step is known to come.

    Of several optimizers the one that takes least counts: which of them steps is not known.

    A gradient that does not exist yet is as large as its parameter. State that does not exist shrinks as what there is
    of it, or else as its parameter.
    """
    trace = context.ledger.trace
    if not trace.first_steps:
        return 0
    held = _find_held(context)
    held_bytes = sum(changed.storages[index].num_bytes for index in held)
    state = [index for index in held if trace.owners[index].role is Role.OPTIMIZER_STATE]
    before, after = (sum(one.storages[index].num_bytes for index in state) for one in (trace, changed))
    state_share = after / before if before else None
    return held_bytes + min(sum_missing(trace, changed, step, state_share) for step in trace.first_steps)


@cache_per_context
def _find_held(context: Context) -> list[int]:
    """Return the storages at the run's end that stay for the step, without gradients."""
    trace = context.ledger.trace
    live = find_live_storages(trace, len(trace.events) - 1, context.ledger.run.refused)
    return [index for index in live if index in trace.owners and trace.owners[index].role in _HELD]


def sum_missing(trace: Trace, changed: Trace, step: FirstStep, state_share: float | None) -> int:
    """Return the bytes of the gradients of a step, and of the state that it still makes."""
    num_bytes = 0.0
    for parameter, gradient, num_states in zip(step.parameters, step.gradients, step.states, strict=True):
        if trace.storages[parameter].device != trace.device:
            continue
        own_bytes = changed.storages[parameter].num_bytes
        state_bytes = own_bytes if state_share is None else state_share * trace.storages[parameter].num_bytes
        num_bytes += num_states * state_bytes
        num_bytes += own_bytes if gradient == NONE else changed.storages[gradient].num_bytes
    return int(num_bytes)
