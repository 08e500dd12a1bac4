"""Which storages are kept after their last use, and when that is known of a run that has ended without memory."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, islice, pairwise
from typing import NamedTuple

from memprof.findings.finding import Context, cache_per_context
from memprof.trace.events import AUTOCAST_KIND, NONE, ROLES_OF_MODELS, Phase, PhaseKind, Role, Trace
from memprof.units import MIB

MIN_BYTES = 64 * MIB  # a finding, or a model: less is a layer or an adapter

MIN_MODEL_PHASES = (
    2  # that compute: one may be a call for the shape of its output, or a sample that is drawn at the end
)

_FORWARD_PHASES = (PhaseKind.FORWARD, PhaseKind.DECODE, PhaseKind.EVALUATION)

_ROLES_OF_TRAINED_MODELS = ROLES_OF_MODELS | {Role.GRADIENT}


def find_idle_storages(context: Context) -> list[int]:
    """Return the storages that are live when a computing phase begins after the one of their last use.

    A forward's tensors that die in a backward, or when a run has ended without memory, belong to autograd: code that no
    operator shows may read them, or would have read them later. Of these only what a variable holds is idle.
    Models that another one has replaced are idle before a phase begins, and inputs only as `_is_idle_input` says.
    """
    trace, deaths = context.ledger.trace, context.lifetimes.deaths
    phases = context.phases
    times = [time for time, _ in phases]
    computing = [time for time, phase in phases if phase.kind.computes]
    out_of_memory = context.ledger.out_of_memory
    last_event = len(trace.events)
    if trace.ended_out_of_memory and out_of_memory is not None:
        last_event = out_of_memory.event
    held = _find_held_storages(context, last_event)
    result = list(find_replaced_models(context))
    for index, used in enumerate(_find_last_uses(context)):
        storage = trace.storages[index]
        if used == NONE or storage.device != trace.device or storage.hidden or index in find_replaced_models(context):
            continue
        following = bisect.bisect_left(computing, used)
        if following == len(computing) or deaths[index] <= computing[following]:
            continue
        owner = trace.owners.get(index)
        if owner is not None and owner.role is Role.INPUT and (index not in held or not _is_idle_input(context, index)):
            continue
        dies_in = phases[bisect.bisect_right(times, deaths[index]) - 1][1].kind
        is_of_autograd = dies_in is PhaseKind.BACKWARD or deaths[index] > last_event
        # Keys and values of a layer that a call had not come to when memory ran out would be used later in that call.
        is_of_model = owner is not None and owner.role is not Role.KV_CACHE
        if not is_of_autograd or is_of_model or index in held:
            result.append(index)
    return result


def _find_last_uses(context: Context) -> list[int]:
    """Return the last use of each storage, for a parameter that of the copy in half precision that it was last used
    for: autocast keeps such copies, and computes with them."""
    trace, births = context.ledger.trace, context.lifetimes.births
    casts: dict[tuple[int, int], int] = {}  # (event after the allocation, number of elements) -> storage
    for index, storage in enumerate(trace.storages):
        if index not in trace.owners and trace.op(storage) == "aten._to_copy":
            casts[births[index] + 1, math.prod(storage.shape)] = index
    last_uses = list(trace.last_uses)
    for index, owner in trace.owners.items():
        cast = casts.get((last_uses[index], math.prod(trace.storages[index].shape)))
        if owner.role is Role.PARAMETER and cast is not None:
            last_uses[index] = max(last_uses[index], last_uses[cast])
    return last_uses


def _is_idle_input(context: Context, index: int) -> bool:
    """Return whether an input is not used in a whole forward pass after its last use, and is none of several that are
    used in turn: a batch in a list, one that was loaded ahead."""
    trace, births = context.ledger.trace, context.lifetimes.births
    used = trace.last_uses[index]
    following = bisect.bisect_left(context.phases, used, key=lambda begin: begin[0])
    ends = (
        end
        for (_, phase), (end, _) in pairwise(islice(context.phases, following, None))
        if phase.kind in _FORWARD_PHASES
    )
    alike = _group_inputs(context)[make_key(trace, index)]
    is_in_turn = any(births[other] < used < trace.last_uses[other] for other in alike)
    return next(ends, len(trace.events)) < context.lifetimes.deaths[index] and not is_in_turn


@cache_per_context
def _group_inputs(context: Context) -> dict[tuple[int, int], list[int]]:
    """Return the inputs by the line and operator that made them."""
    trace = context.ledger.trace
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, owner in trace.owners.items():
        if owner.role is Role.INPUT:
            groups[make_key(trace, index)].append(index)
    return groups


def _find_held_storages(context: Context, last_event: int) -> set[int]:
    """Return the storages that a holder was seen to have, and those that it has at `last_event`, an error.

    A holder that was seen in an earlier step has as many of the tensors that the same line made last, if these too
    were last used in a phase of the same kind. Others have a use in the step that the error has cut.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    phases = context.phases
    holders = [holder for holder in trace.idle_holders if holder.kind != AUTOCAST_KIND]  # copies that backwards use
    held = {index for holder in holders for index in holder.storages}
    if last_event < len(trace.events):
        for holder in (one for one in holders if one.event <= last_event):
            for key, count in Counter(make_key(trace, index) for index in holder.storages).items():
                alike = [index for index in range(len(trace.storages)) if make_key(trace, index) == key]
                newest = lifetimes.find_live(last_event, alike).storages[-count:]
                seen = [index for index in holder.storages if make_key(trace, index) == key]
                kinds = {find_phase(phases, trace.last_uses[index]).kind for index in seen}
                held.update(i for i in newest if find_phase(phases, trace.last_uses[i]).kind in kinds)
    return held


@cache_per_context
def find_replaced_models(context: Context) -> frozenset[int]:
    """Return the storages of models that were last used before another model was built, in which memory ran out.

    They have computed in several phases, and none of their parameters was used after the first new one was allocated;
    a program that has come further may use them again, and then shows it.
    """
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    if not trace.ended_out_of_memory:
        return frozenset()
    phases = context.phases
    used = {
        index: trace.last_uses[index]
        for index, owner in trace.owners.items()
        if owner.role in _ROLES_OF_TRAINED_MODELS
        and trace.storages[index].device == trace.device
        and trace.last_uses[index] != NONE
        and find_phase(phases, trace.last_uses[index]).kind.computes
        and not awaits_backward(context, index)
    }
    parameters = [
        index
        for index, owner in trace.owners.items()
        if owner.role is Role.PARAMETER and trace.storages[index].device == trace.device
    ]
    parameters.sort(key=lambda index: births[index])
    replaced_at, last_use = 0, NONE
    new_bytes = context.lifetimes.sum_bytes(index for index in parameters if deaths[index] == len(trace.events))
    for index in parameters:
        # A model may call parts of itself while it is built: what follows is little, and no model.
        if replaced_at <= last_use < births[index] and new_bytes >= MIN_BYTES:
            replaced_at = births[index]
        last_use = max(last_use, used.get(index, NONE))
        new_bytes -= context.lifetimes.sum_bytes([index]) if deaths[index] == len(trace.events) else 0
    computing = [time for time, phase in phases if phase.kind.computes and time < replaced_at]
    if len(computing) < MIN_MODEL_PHASES:
        return frozenset()
    return frozenset(index for index, event in used.items() if event < replaced_at < deaths[index])


class RetainedGraph(NamedTuple):
    """The tensors that a backward has used and not freed, as `backward(retain_graph=True)` does."""

    storages: tuple[int, ...]
    source: str | None  # the line that calls backward()


@cache_per_context
def find_retained_graph(context: Context) -> RetainedGraph | None:
    """Return the graph of the last backward, if an optimizer has made a step since, most of what the backward has used
    last is still there when memory runs out in a forward, and no variable holds that; None if it is no such run.

    Gradients with a graph of their own (`create_graph=True`) are to be differentiated again.
    """
    trace, oom, lifetimes = context.ledger.trace, context.ledger.out_of_memory, context.lifetimes
    if not trace.ended_out_of_memory or oom is None or not trace.last_uses:
        return None
    phases = [(time, phase) for time, phase in context.phases if time <= oom.event]
    begins = [time for time, phase in phases if phase.kind is PhaseKind.BACKWARD]
    if not begins or phases[-1][1].kind is not PhaseKind.FORWARD or trace.graph_backwards:
        return None
    begin = begins[-1]
    end = next(time for time, _ in phases if time > begin)
    if not any(phase.kind is PhaseKind.OPTIMIZER_STEP and time >= end for time, phase in phases):
        return None
    held = {index for holder in (*trace.idle_holders, *trace.holders) for index in holder.storages}
    held.update(index for call in trace.forwards for index in call.outputs)
    used = [
        index
        for index, storage in enumerate(trace.storages)
        if trace.phases[storage.phase].kind is PhaseKind.FORWARD and index not in trace.owners and not storage.hidden
        if lifetimes.births[index] < begin < trace.last_uses[index] <= end
    ]
    retained = tuple(index for index in used if lifetimes.deaths[index] > oom.event and index not in held)
    if not retained or 2 * len(retained) < len(used):
        return None
    made = (index for index, birth in enumerate(lifetimes.births) if begin < birth < end)
    lines = (trace.source_at(caller.source) for index in made for caller in trace.list_callers(index)[-1:])
    return RetainedGraph(retained, next(lines, None))


@cache_per_context
def find_unused_model(context: Context) -> tuple[int, ...]:
    """Return the parameters of a model that nothing has computed with when memory runs out after the begin of a
    backward: the largest group of such that were put on the GPU one after another, without others in between.

    The experts of a model that no token was sent to lie between parameters that are used.
    """
    trace, births, oom = context.ledger.trace, context.lifetimes.births, context.ledger.out_of_memory
    computing = [time for time, phase in context.phases if phase.kind.computes]
    backwards = [time for time, phase in context.phases if phase.kind is PhaseKind.BACKWARD]
    if not trace.ended_out_of_memory or oom is None or not trace.last_uses or not backwards:
        return ()
    last_uses = _find_last_uses(context)
    parameters = [
        index
        for index, owner in trace.owners.items()
        if owner.role is Role.PARAMETER and trace.storages[index].device == trace.device
    ]
    parameters.sort(key=births.__getitem__)
    by_use = groupby(parameters, lambda index: births[index] < computing[0] >= last_uses[index])
    groups = (list(group) for is_unused, group in by_use if is_unused)
    largest = max(groups, key=context.lifetimes.sum_bytes, default=[])
    return tuple(index for index in largest if context.lifetimes.deaths[index] > oom.event)


def awaits_backward(context: Context, index: int) -> bool:
    """Return whether storage `index` was last used in a call with a graph, and memory ran out before a backward."""
    trace, used = context.ledger.trace, context.ledger.trace.last_uses[index]
    if not trace.ended_out_of_memory:
        return False
    position = bisect.bisect_left(trace.forwards, used, key=lambda forward: forward.begin) - 1
    has_graph = position < 0 or used > trace.forwards[position].end or trace.forwards[position].nodes > 0
    is_forward = find_phase(context.phases, used).kind is PhaseKind.FORWARD
    return is_forward and has_graph and _find_last_graph_end(context) < used


@cache_per_context
def _find_last_graph_end(context: Context) -> int:
    """Return the event at which the last phase begins after which no graph of a forward is waited for; else NONE."""
    ends = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.EVALUATION)
    return next((time for time, phase in reversed(context.phases) if phase.kind in ends), NONE)


def make_key(trace: Trace, index: int) -> tuple[int, int]:
    """Return the line and the operator that made a storage."""
    return trace.storages[index].source, trace.storages[index].op


def find_phase(phases: Sequence[tuple[int, Phase]], num_events: int) -> Phase:
    """Return the phase that was running after so many events; `phases` are those of `Trace.list_phase_begins`."""
    return phases[max(bisect.bisect_left(phases, num_events, key=lambda begin: begin[0]) - 1, 0)][1]
