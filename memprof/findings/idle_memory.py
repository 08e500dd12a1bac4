"""Memory that a program keeps after its last use: the last step's logits, a loaded checkpoint, a first model."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from memprof.findings.effect import compute_needs_without, effect_evidence, is_decisive
from memprof.findings.evidence import file_and_line, format_shape, plural, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.growth import describe_holder, find_idle_holder, find_step_leaks, holder_key, is_of_model
from memprof.findings.lifetimes import Saving
from memprof.ledger.stages import format_stage
from memprof.trace.events import NONE, ROLES_OF_MODELS, EventKind, Holder, Phase, PhaseKind, Role, Trace
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.05  # found when the run's peak would be lower by at least both, the latter of the peak

MIN_MODEL_PHASES = 2  # that compute after its last use: one may be the samples that a program draws at its end
MIN_MODEL_BYTES = 256 * MIB  # a model that is no longer used is found from here on, even if the peak is elsewhere

_MOST_SHOWN = 3


class _Group(NamedTuple):
    """Storages that one variable, line or model keeps after their last use."""

    description: str  # for the title
    fix: str
    holder: Holder | None
    storages: list[int]
    is_model: bool = False


@rule(55)
def find(context: Context) -> list[Finding]:
    """Return a finding for each holder; `num_bytes` is the reduction of the peak by freeing after the last use.

    For a model that is no longer used while the peak is at another moment: the bytes of the model.
    """
    trace = context.ledger.trace
    if trace.facts.command == "profile":
        return []  # the loop is memprof's own, and not one that the user can change
    if not trace.last_uses or any(kind is EventKind.POOL for kind, _ in trace.events):
        return []  # uses are not known: not recorded, or those of CUDA graphs, whose replays show no operator
    kept_by_errors = {index for holder in trace.error_holders for index in holder.storages}
    groups = _make_groups(context, (index for index in _find_idle_storages(context) if index not in kept_by_errors))
    groups += _make_error_groups(trace)
    return [finding for group in groups if (finding := _make_finding(context, group)) is not None]


def _find_idle_storages(context: Context) -> list[int]:
    """Return the storages that are live when a computing phase begins after the one of their last use.

    A forward's tensors that die in a backward, or when a run has ended without memory, belong to autograd: code that no
    operator shows may read them, or would have read them later. Of these only what a variable holds is idle.
    """
    trace, deaths = context.ledger.trace, context.lifetimes.deaths
    phases = trace.list_phase_begins()
    times = [time for time, _ in phases]
    computing = [time for time, phase in phases if phase.kind.computes]
    out_of_memory = context.ledger.out_of_memory
    last_event = len(trace.events)
    if trace.ended_out_of_memory and out_of_memory is not None:
        last_event = out_of_memory.event
    held = _find_held_storages(context, last_event)
    result = []
    for index, used in enumerate(trace.last_uses):
        storage = trace.storages[index]
        if used == NONE or storage.device != trace.device or storage.hidden:
            continue
        following = bisect.bisect_left(computing, used)
        if following == len(computing) or deaths[index] <= computing[following]:
            continue
        dies_in = phases[bisect.bisect_right(times, deaths[index]) - 1][1].kind
        is_of_autograd = dies_in is PhaseKind.BACKWARD or deaths[index] > last_event
        if not is_of_autograd or index in trace.owners or index in held:
            result.append(index)
    return result


def _find_held_storages(context: Context, last_event: int) -> set[int]:
    """Return the storages that a holder was seen to have, and those that it has at `last_event`, an error.

    The holder was seen in an earlier step: it has as many of the tensors that the same line made last, if these too
    were last used in a phase of the same kind. Others have a use in the step that the error has cut.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    phases = trace.list_phase_begins()
    held = {index for holder in trace.idle_holders for index in holder.storages}
    if last_event < len(trace.events):
        for holder in trace.idle_holders:
            for key, count in Counter(_make_key(trace, index) for index in holder.storages).items():
                alike = [index for index in range(len(trace.storages)) if _make_key(trace, index) == key]
                newest = lifetimes.find_live(last_event, alike).storages[-count:]
                seen = [index for index in holder.storages if _make_key(trace, index) == key]
                kinds = {_find_phase(phases, trace.last_uses[index]).kind for index in seen}
                held.update(i for i in newest if _find_phase(phases, trace.last_uses[i]).kind in kinds)
    return held


def _make_key(trace: Trace, index: int) -> tuple[int, int]:
    """Return the line and the operator that made a storage."""
    return trace.storages[index].source, trace.storages[index].op


def _make_groups(context: Context, storages: Iterable[int]) -> list[_Group]:
    """Return the idle storages by holder, else by line; parameters and their optimizer state, and gradients, as one."""
    trace = context.ledger.trace
    # What piles up is another finding's.
    leaks = (leak for group in find_step_leaks(context).values() for leak in group)
    growing = {index for leak in leaks if not is_of_model(trace, leak) for index in leak.storages}
    by_key: dict[tuple[int, int], list[int]] = defaultdict(list)
    models: list[int] = []
    gradients: list[int] = []
    phases = trace.list_phase_begins()
    for index in storages:
        owner = trace.owners.get(index)
        last_phase = _find_phase(phases, trace.last_uses[index]).kind
        if index in growing:
            continue
        if owner is None or owner.role is Role.KV_CACHE:
            by_key[_make_key(trace, index)].append(index)
        elif owner.role in ROLES_OF_MODELS and last_phase.computes and not _awaits_backward(context, index):
            models.append(index)
        elif owner.role is Role.GRADIENT and last_phase is PhaseKind.OPTIMIZER_STEP:
            gradients.append(index)
    by_holder: dict[Holder | tuple[int, int], list[int]] = defaultdict(list)
    for key, members in by_key.items():
        holder = find_idle_holder(trace, members)
        if holder is None or not _is_kept_on_purpose(context, holder, members):
            by_holder[holder or key] += members
    groups = [_make_ownerless_group(trace, key, members) for key, members in by_holder.items()]
    parameters = [index for index in models if trace.owners[index].role is Role.PARAMETER]
    num_models = _count_models(context, parameters)
    last_use = max((trace.last_uses[index] for index in parameters), default=0)
    computing = [time for time, phase in phases if phase.kind.computes and time >= last_use]
    program = trace.facts.program
    has_ended = program is not None and program.ended == "exit"  # one that was stopped may use the model later
    if num_models > 1 or (num_models and has_ended and len(computing) >= MIN_MODEL_PHASES):
        holder = find_idle_holder(trace, parameters)
        by = "" if holder is None else f", kept by {_format_holder(holder)}"
        what = "a model that is no longer used"
        if num_models > 1:
            each = sum(trace.storages[index].num_bytes for index in models) // num_models
            what = f"{num_models} models built one after another, {format_bytes(each)} each with what belongs to it"
        fix = "delete the model and its optimizer, or move them to the host"
        groups.append(_Group(f"{what}{by}", fix, holder, models, is_model=True))
    if gradients:
        fix = "call zero_grad() right after the optimizer's step, before the next forward pass"
        groups.append(_Group("gradients that the optimizer has used", fix, None, gradients))
    return groups


def _make_error_groups(trace: Trace) -> list[_Group]:
    """Return the groups of tensors that caught out-of-memory errors keep, by the `except` block or variable."""
    holders: dict[tuple[object, ...], list[Holder]] = defaultdict(list)
    for holder in trace.error_holders:
        holders[holder_key(holder)].append(holder)
    groups = []
    for (holder, *_), storages in (
        (same, [i for holder in same for i in holder.storages]) for same in holders.values()
    ):
        place = "" if holder.source is None else f" ({file_and_line(holder.source)})"
        if holder.is_handler:
            retrying = f"`{holder.name}`" if holder.name else "a library"
            by = f"the `except` block in which {'the script' if retrying == '`<module>`' else retrying} retries{place}"
            fix = "leave the `except` block before the retry: set a flag in it, and retry after the block"
        else:
            by = f"the traceback of {_format_holder(holder)}"
            fix = f"keep no exception in `{holder.name}`: its text, str(error), is enough"
        groups.append(_Group(f"tensors of an attempt that ran out of memory, kept by {by}", fix, holder, storages))
    return groups


def _awaits_backward(context: Context, index: int) -> bool:
    """Return whether storage `index` was last used in the forward in which, or after which, memory ran out."""
    trace = context.ledger.trace
    if not trace.ended_out_of_memory:
        return False
    phases = trace.list_phase_begins()
    later = phases[bisect.bisect_left(phases, trace.last_uses[index], key=lambda begin: begin[0]) :]
    ended = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.EVALUATION)
    return _find_phase(phases, trace.last_uses[index]).kind is PhaseKind.FORWARD and not any(
        phase.kind in ended for _, phase in later
    )


def _count_models(context: Context, parameters: Iterable[int]) -> int:
    """Return the number of models that `parameters` belong to: those of one line and shape, between which the program
    has computed."""
    trace, births = context.ledger.trace, context.lifetimes.births
    computed = sorted(
        {time for time, phase in trace.list_phase_begins() if phase.kind.computes}.union(
            forward.end for forward in trace.forwards
        )
    )
    rounds: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for index in parameters:
        key = (*_make_key(trace, index), trace.storages[index].shape, trace.storages[index].dtype)
        rounds[key].add(bisect.bisect_left(computed, births[index]))
    return max(map(len, rounds.values()), default=0)


def _find_phase(phases: Sequence[tuple[int, Phase]], num_events: int) -> Phase:
    """Return the phase that was running after so many events; `phases` are those of `Trace.list_phase_begins`."""
    return phases[max(bisect.bisect_left(phases, num_events, key=lambda begin: begin[0]) - 1, 0)][1]


def _is_kept_on_purpose(context: Context, holder: Holder, members: Sequence[int]) -> bool:
    """Return whether a program keeps `members` on purpose: in a cache of limited size, or in a window of steps, which
    has more of them at a time than the holder that was seen in one step."""
    num_held = len(set(members).intersection(holder.storages))
    return holder.limit is not None or _find_most(context, members, lambda index: 1) > num_held


def _make_ownerless_group(trace: Trace, key: Holder | tuple[int, int], members: list[int]) -> _Group:
    """Return the group of tensors that a holder keeps, or, where none was seen, that one line made."""
    largest = trace.storages[max(members, key=lambda index: trace.storages[index].num_bytes)]
    load_fix = 'load it with map_location="cpu"' if trace.op(largest) == "torch.load" else ""
    if not isinstance(key, Holder):
        made = f"the result of {trace.op(largest)} at {file_and_line(trace.source_line(largest))}"
        return _Group(made, load_fix or "drop the last reference after the last use", None, members)
    variable = key.name.partition("[")[0]
    is_variable = "." not in variable and (not key.kind or load_fix)
    fix = f"`del {variable}` after the last use" if is_variable else f"drop the tensors of `{key.name}` after their use"
    return _Group(_format_holder(key), f"{load_fix}, or {fix}" if load_fix else fix, key, members)


def _format_holder(holder: Holder) -> str:
    """Return the holder with its line, for the title: "variable `out` (train.py:10)"."""
    place = "" if holder.source is None else f" ({file_and_line(holder.source)})"
    return f"{describe_holder(holder)}{place}"


def _make_finding(context: Context, group: _Group) -> Finding | None:
    ledger, lifetimes = context.ledger, context.lifetimes
    trace = ledger.trace
    frees = {index: trace.last_uses[index] for index in group.storages}
    saved = lifetimes.peak_reduction(
        [Saving(used, lifetimes.deaths[i], lifetimes.sum_bytes([i])) for i, used in frees.items()]
    )
    kept = _find_most(context, group.storages, lambda index: lifetimes.sum_bytes([index]))
    needs = None
    is_at_peak = saved >= MIN_BYTES and saved >= MIN_SHARE * ledger.peak_bytes
    if is_at_peak or (kept >= MIN_BYTES and not ledger.run.fits):
        needs = compute_needs_without(context, frees)
    if not is_at_peak and not is_decisive(context, needs):
        needs = None
        if not group.is_model or kept < MIN_MODEL_BYTES:
            return None
    where = _format_last_use(context, max(frees.values()))
    title = (
        f"{format_bytes(kept)} stay on the GPU unused: {group.description}{where}"
        f"{'; without it the run fits' * is_decisive(context, needs)}"
    )
    evidence = (
        _make_fix_evidence(group),
        effect_evidence(context, needs)
        if needs is not None
        else Evidence("the run's peak is at another moment, and the same without it"),
        *_make_tensor_evidence(context, group.storages),
    )
    severity = Severity.NOTE if needs is None else Severity.WARNING
    num_bytes = saved if is_at_peak else kept
    return Finding("idle-memory", severity, title, num_bytes, evidence, (), is_decisive=is_decisive(context, needs))


def _format_last_use(context: Context, event: int) -> str:
    """Return the stage of the last use, for the title; a stage that allocates nothing has its phase's name."""
    stages = [span for span in context.ledger.spans if span.begin < event <= span.end]
    if stages:
        name, step, micro_batch = stages[0].name, stages[0].step, stages[0].micro_batch
    else:
        kind, step, micro_batch = _find_phase(context.ledger.trace.list_phase_begins(), event)
        name = kind.value
    return "" if name == PhaseKind.OTHER.value else f", last used in {format_stage(name, step, micro_batch)}"


def _make_fix_evidence(group: _Group) -> Evidence:
    """Return evidence of the fix, with the line that fills the holder, or assigns to the variable."""
    return Evidence(f"fix: {group.fix}", source=None if group.holder is None else group.holder.source)


def _find_most(context: Context, storages: Iterable[int], measure: Callable[[int], int]) -> int:
    """Return the largest sum of `measure` over the storages that are kept after their last use at one moment."""
    last_uses, deaths = context.ledger.trace.last_uses, context.lifetimes.deaths
    changes = []
    for index in storages:
        amount = measure(index)
        changes += [(last_uses[index], amount), (deaths[index], -amount)]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _make_tensor_evidence(context: Context, storages: Iterable[int]) -> list[Evidence]:
    """Return evidence of the kinds of tensors with the most bytes."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in storages:
        kinds[trace.storages[index].shape, trace.storages[index].dtype, *_make_key(trace, index)].append(index)
    result = []
    for members in sorted(kinds.values(), key=lambda members: -lifetimes.sum_bytes(members))[:_MOST_SHOWN]:
        storage = trace.storages[members[0]]
        text = (
            f"{plural(len(members), 'tensor')} {format_shape(storage.shape)} {storage.dtype} by {trace.op(storage)} at "
            f"{file_and_line(trace.source_line(storage))}"
        )
        result.append(tensor_evidence(trace, members[0], text, num_bytes=lifetimes.sum_bytes(members)))
    return result
