"""Models alike that take turns on the GPU, as the clients of a federated run: one computes, the others wait there."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from memprof.findings.finding import Context, cache_per_context
from memprof.findings.idle_storages import find_phase
from memprof.trace.events import NONE, ROLES_OF_MODELS, Role

MIN_TURNS = 3  # models that were trained in steps of their own: two may be a teacher and a student

_OF_TRAINED = frozenset({Role.GRADIENT, *ROLES_OF_MODELS}) - {Role.PARAMETER}


class WaitingModels(NamedTuple):
    """Models that wait where memory runs out."""

    num_models: int  # all of them, that which computes included
    storages: list[int]  # of those that wait: parameters, gradients, optimizer state
    parameters: list[int]  # those of `storages` that are parameters, by their allocation


@cache_per_context
def find_waiting_models(context: Context) -> WaitingModels | None:
    """Return the models that wait while memory runs out in a step of another one; None if none do.

    Models are alike if parameters have equal names and shapes. They take turns if those that were trained were used
    last in steps of their own, mostly: a step may end one turn and begin the next.
    """
    trace, lifetimes, oom = context.ledger.trace, context.lifetimes, context.ledger.out_of_memory
    if not trace.ended_out_of_memory or oom is None or not trace.last_uses:
        return None
    current = find_phase(context.phases, oom.event).step
    named: dict[tuple[object, ...], list[int]] = defaultdict(list)
    unnamed: list[int] = []  # of models that were not called yet
    for index, owner in trace.owners.items():
        if owner.role is Role.PARAMETER and index in lifetimes.at_peak:
            storage = trace.storages[index]
            (named[owner.name, storage.shape, storage.dtype] if owner.name else unnamed).append(index)
    alike = max(named.values(), key=lambda members: (len(members), lifetimes.sum_bytes(members)), default=[])
    built = sorted(lifetimes.births[index] for index in alike)[1:]  # the first may be trained before it is copied
    if len(built) < MIN_TURNS - 1:
        return None
    if any(phase.kind.computes and built[0] < time < built[-1] for time, phase in context.phases):
        return None  # each is built for its turn: they pile up
    turns = [step for index in alike if (step := _find_step(context, index))]
    if not current or len(set(turns)) < MIN_TURNS or 2 * len(set(turns)) <= len(turns):
        return None
    parameters = [index for members in named.values() if len(members) == len(alike) for index in members]
    model_bytes = lifetimes.sum_bytes(parameters) // len(alike)
    lines = {trace.storages[index].source for index in parameters}
    parameters += [index for index in unnamed if trace.storages[index].source in lines]
    # What was not used yet, of a gradient or of state, is of the model that computes.
    others = [
        index for index, owner in trace.owners.items() if owner.role in _OF_TRAINED and trace.last_uses[index] != NONE
    ]
    waiting = [
        index
        for index in (*parameters, *others)
        if index in lifetimes.at_peak and _find_step(context, index) != current
    ]
    num_models = lifetimes.sum_bytes(parameters) // model_bytes
    return WaitingModels(num_models, waiting, sorted(set(parameters).intersection(waiting)))


def _find_step(context: Context, index: int) -> int:
    """Return the step in which a storage was last used to compute; 0 if it has not been."""
    used = context.ledger.trace.last_uses[index]
    if used == NONE:
        return 0
    phase = find_phase(context.phases, used)
    return phase.step if phase.kind.computes else 0
