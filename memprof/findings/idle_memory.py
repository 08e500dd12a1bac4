"""Memory that a program keeps after its last use: the last step's logits, a loaded checkpoint, a first model."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from memprof.findings.edits import Edit, EditKind, make_holder_edit
from memprof.findings.effect import (
    compute_needs_of,
    compute_needs_with_frees,
    effect_evidence,
    is_decisive,
    name_other_place,
)
from memprof.findings.evaluation_accumulates import find_kept_storages
from memprof.findings.evaluation_with_gradients import find_covered_storages
from memprof.findings.evidence import file_and_line, find_own_line, format_shape, names_of, plural, tensor_evidence
from memprof.findings.finding import Context, Culprit, Evidence, Finding, Severity, rule
from memprof.findings.growth import (
    CONTAINERS,
    CYCLE_FIXES,
    describe_holder,
    find_growing_storages,
    find_idle_holder,
    holder_key,
)
from memprof.findings.growth_until_peak import find_piled_up_storages, list_growth_holders
from memprof.findings.idle_storages import (
    MIN_BYTES,
    MIN_MODEL_PHASES,
    awaits_backward,
    find_idle_storages,
    find_phase,
    find_replaced_models,
    find_retained_graph,
    find_unused_model,
    make_key,
)
from memprof.findings.lifetimes import Saving
from memprof.findings.proposals.messages import GATHERS
from memprof.findings.waiting_models import WaitingModels, find_waiting_models
from memprof.findings.weight_snapshots import (
    find_cloned_weights,
    find_reread_snapshots,
    find_snapshots,
    find_unread_snapshots,
)
from memprof.ledger.stages import describe_name, format_stage
from memprof.ledger.what_if import resize
from memprof.trace.events import (
    NONE,
    ROLES_OF_MODELS,
    CycleKind,
    EventKind,
    Forward,
    Holder,
    PhaseKind,
    Role,
    Storage,
    Trace,
)
from memprof.units import MIB, format_bytes

MIN_SHARE = 0.05  # of the peak: found when the peak would be lower by at least this and MIN_BYTES

MIN_TIMES = 8  # as many bytes as what is gathered of it has a tensor that is computed for more than is used

MIN_MODEL_BYTES = 256 * MIB  # a model that is no longer used is found from here on, even if the peak is elsewhere

_MOST_SHOWN = 3

# What makes the weights of a functional call from those before it: no model is built.
_UPDATES = {"aten.sub", "aten.add", "aten.mul", "aten.addcmul", "aten.addcdiv", "aten.lerp"}


class _Group(NamedTuple):
    """Storages that one variable, line or model keeps after their last use."""

    description: str  # for the title
    fix: str
    source: str | None  # the line that fills the holder, or assigns to the variable, or makes the call
    storages: list[int]
    is_model: bool = False
    is_snapshot: bool = False  # takes nothing on the GPU with `fix`; what is none is freed after its last use
    is_unused: bool = False  # a model that nothing has computed with
    saves_more: bool = False  # `fix` makes other tensors smaller too: what the run needs with it is not known
    note: str = ""  # more evidence
    edit: Edit | None = None  # the change of the program that `fix` is
    holder: Holder | None = None  # None: not one alone, or not seen
    name: str = ""  # of what has no holder, in the breakdown of the peak


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
    others = {index for holder in trace.error_holders for index in holder.storages}
    others |= find_growing_storages(context) | find_piled_up_storages(context)
    others |= find_covered_storages(context) | find_kept_storages(context)
    if not _has_exited(trace):
        read_later = {index for holder in trace.idle_holders if holder.is_read_later for index in holder.storages}
        others |= (read_later | find_cloned_weights(context)) - find_snapshots(context)
    storages = dict.fromkeys([*find_idle_storages(context), *_list_other_snapshots(context)])
    waiting = find_waiting_models(context)
    if waiting is not None:
        others.update(waiting.storages, names_of(trace, Role.GRADIENT))
    groups = _make_groups(context, (index for index in storages if index not in others))
    groups += _make_error_groups(trace)
    groups += [] if waiting is None else [_make_waiting_group(trace, waiting)]
    groups += [*_make_unused_groups(context), *_make_retained_groups(context)]
    return [finding for group in groups if (finding := _make_finding(context, group)) is not None]


def _has_exited(trace: Trace) -> bool:
    """Return whether the program has come to its end: one that has not may use later what it has not used so far."""
    return trace.facts.program is not None and trace.facts.program.ended == "exit"


def _list_other_snapshots(context: Context) -> list[int]:
    """Return the copies of a model's state that no operator uses while the program trains, even if nothing was seen to
    hold them, and those that one line has made when memory runs out in making the next of them."""
    trace, oom = context.ledger.trace, context.ledger.out_of_memory
    refused = None if oom is None or not trace.ended_out_of_memory else make_key(trace, oom.storage)
    in_progress = (index for index in find_snapshots(context) if make_key(trace, index) == refused)
    last_begin = max((time for time, phase in context.phases if phase.kind.computes), default=0)
    unread = (index for index in find_unread_snapshots(context) if trace.last_uses[index] <= last_begin)
    return sorted({*find_reread_snapshots(context), *unread, *in_progress})


def _make_groups(context: Context, storages: Iterable[int]) -> list[_Group]:
    """Return the idle storages by holder, else by line; parameters and their optimizer state, and gradients, as one."""
    trace = context.ledger.trace
    by_key: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    models: list[int] = []
    gradients: list[int] = []
    cycles, growing = _find_cycles(trace), {(one.kind, one.name) for one in list_growth_holders(context)}
    replaced = {index for index in find_replaced_models(context) if make_key(trace, index) not in cycles}
    if all(trace.owners[index].role is not Role.PARAMETER for index in replaced):
        replaced = set()  # gradients of a model that a cycle keeps
    by_holder: dict[Holder, list[int]] = defaultdict(list)
    for index in storages:
        owner = trace.owners.get(index)
        if (cycle := cycles.get(make_key(trace, index))) is not None:
            if (cycle.kind, cycle.name) not in growing:
                by_holder[cycle].append(index)
            continue
        last_phase = find_phase(context.phases, trace.last_uses[index]).kind
        if owner is None or owner.role in (Role.KV_CACHE, Role.INPUT):
            by_key[*make_key(trace, index), index in find_snapshots(context)].append(index)
        elif index in replaced or (
            owner.role in ROLES_OF_MODELS
            and trace.op(trace.storages[index]) not in _UPDATES
            and last_phase.computes
            and not awaits_backward(context, index)
        ):
            models.append(index)
        elif owner.role is Role.GRADIENT and last_phase is PhaseKind.OPTIMIZER_STEP:
            gradients.append(index)
    by_call: dict[tuple[int, int], dict[int, Forward]] = defaultdict(dict)
    groups = []
    for (_, _, are_snapshots), members in by_key.items():
        holder = find_idle_holder(trace, members)
        if are_snapshots:
            groups.append(_make_snapshot_group(trace, holder, members))
        elif holder is None:
            calls = _find_calls_without_backward(context, members)
            for index, call in calls.items():
                by_call[call.module, call.source][index] = call
            if rest := [index for index in members if index not in calls]:
                groups.append(_make_line_group(trace, rest))
        elif not _is_kept_on_purpose(context, holder, members):
            by_holder[holder] += members
    groups += [_make_holder_group(trace, holder, members) for holder, members in by_holder.items()]
    groups += [_make_call_group(context, calls) for calls in by_call.values()]
    groups += _make_model_groups(context, models, replaced)
    if gradients:
        groups.append(_make_gradient_group(trace, context.lifetimes.births, gradients))
    return groups


def _make_gradient_group(trace: Trace, births: Sequence[int], gradients: list[int]) -> _Group:
    """Return the group of gradients that are kept after the step of their optimizer."""
    last_step = max((trace.last_uses[index] for index in gradients), default=0)
    in_steps = (
        one
        for one, birth in zip(trace.storages, births, strict=True)
        if trace.phases[one.phase].kind is PhaseKind.OPTIMIZER_STEP and birth <= last_step
    )
    lines = [line for one in in_steps if (line := trace.source_line(one)) is not None]
    source = lines[-1] if lines else None
    where = "" if source is None else f" at {file_and_line(source)}"
    fix = f"call zero_grad() right after the optimizer's step{where}"
    return _Group(
        "gradients (.grad) after the optimizer's step", fix, source, gradients, edit=_make_gradients_edit(trace)
    )


def _make_gradients_edit(trace: Trace) -> Edit | None:
    """Return the edit of the file that trains: of the last call with gradients that was recorded."""
    calls = (call for call in reversed(trace.forwards) if call.nodes and call.training)
    source = next((trace.source_at(call.source) for call in calls), None)
    return None if source is None else Edit(EditKind.FREE_GRADIENTS, source)


def _find_cycles(trace: Trace) -> dict[tuple[int, int], Holder]:
    """Return the reference cycles that keep what the program has dropped, by line and operator of their tensors."""
    return {make_key(trace, index): one for one in trace.idle_holders if one.is_cycle for index in one.storages}


def _make_model_groups(context: Context, models: Sequence[int], replaced: Iterable[int]) -> list[_Group]:
    """Return at most one group, of the idle storages of models: several, one that another has replaced, which has the
    storages `replaced`, or one that a program has not used until its end."""
    trace, deaths = context.ledger.trace, context.lifetimes.deaths
    parameters = [index for index in models if trace.owners[index].role is Role.PARAMETER]
    num_models = _count_models(context, parameters)
    if num_models <= 1 and replaced:  # what was read later, when it was looked for, is of the earlier model too
        models = sorted(replaced)
        parameters = [index for index in models if trace.owners[index].role is Role.PARAMETER]
    last_use = max((trace.last_uses[index] for index in parameters), default=0)
    computing = [time for time, phase in context.phases if phase.kind.computes and time >= last_use]
    holder = find_idle_holder(trace, parameters)
    has_state = any(trace.owners[index].role is Role.OPTIMIZER_STATE for index in models)
    fix = _make_model_fix(trace, holder, has_state=has_state)
    if num_models > 1:
        each = format_bytes(sum(trace.storages[index].num_bytes for index in models) // num_models)
        if len({trace.owners[index].name for index in parameters}) == len(parameters):
            source = find_own_line(trace, parameters[-1])
            place = "" if source is None else f" at {file_and_line(source)}"
            what = f"{num_models} sets of parameters added to one model one after another{place}, {each} each"
            fix = "remove each set from the model after its use (PEFT: model.delete_adapter(NAME))"
            return [_Group(what, fix, source, list(models), is_model=True)]
        what = f"{num_models} models built one after another, {each} each"
    elif replaced:
        what = "an earlier model"
    elif num_models and _has_exited(trace) and _is_past(context, last_use, computing):
        what = "a model that is no longer used"
        # Not what was freed before: what an attempt leaves that has run out of memory in the optimizer's step.
        models = [index for index in models if deaths[index] > computing[MIN_MODEL_PHASES - 1]]
    else:
        return []
    by = "" if holder is None else f", kept by {_format_holder(holder)}"
    source = None if holder is None else holder.source
    return [_Group(f"{what}{by}", fix, source, list(models), is_model=True, name=what.partition(",")[0])]


def _make_retained_groups(context: Context) -> list[_Group]:
    """Return at most one group, of the graph that a backward was told to retain."""
    found = find_retained_graph(context)
    if found is None:
        return []
    place = "" if found.source is None else f" at {file_and_line(found.source)}"
    what = f"the graph of the backward(){place}, kept by retain_graph=True"
    fix = "leave out retain_graph=True if no later backward goes through this graph"
    return [_Group(what, fix, found.source, list(found.storages), name="a retained graph")]


def _is_past(context: Context, last_use: int, computing: Sequence[int]) -> bool:
    """Return whether a model that was last used at the event `last_use` is no longer used, if phases begin at
    `computing` after it: several, and not all of the step in which it was used, as of another one of a GAN's models."""
    step = find_phase(context.phases, last_use).step
    is_of_step = all(phase.step == step for time, phase in context.phases if phase.kind.computes and time >= last_use)
    trains = any(phase.kind is PhaseKind.OPTIMIZER_STEP and phase.step == step for _, phase in context.phases)
    return len(computing) >= MIN_MODEL_PHASES and not (trains and is_of_step)


def _make_unused_groups(context: Context) -> list[_Group]:
    """Return at most one group, of a model that nothing has computed with when memory runs out."""
    trace, unused = context.ledger.trace, find_unused_model(context)
    if context.lifetimes.sum_bytes(unused) < MIN_MODEL_BYTES:
        return []
    source = find_own_line(trace, unused[0])
    what = "a model" if source is None else f"a model made at {file_and_line(source)}"
    fix = "do not put it on the GPU if it is not needed here, or only when it is used"
    return [_Group(what, fix, source, list(unused), is_unused=True, name="a model that was not used")]


def _make_waiting_group(trace: Trace, waiting: WaitingModels) -> _Group:
    """Return the group of models that take turns."""
    source = find_own_line(trace, waiting.parameters[-1])
    place = "" if source is None else f" made at {file_and_line(source)}"
    what = (
        f"{waiting.num_models} models alike{place} take turns: all but one wait there, with the gradients and the "
        "optimizer state of those that were trained"
    )
    fix = (
        "keep the models in host memory and move one at a time to the GPU, with its optimizer's state; or one model "
        "and one optimizer for all, whose state_dicts are loaded for each turn"
    )
    return _Group(what, fix, source, waiting.storages, is_model=True)


def _make_model_fix(trace: Trace, holder: Holder | None, *, has_state: bool) -> str:
    """Return what to do with a model that is no longer used; if `holder` is a cache or a container, with that."""
    if holder is not None and holder.kind == "lru_cache":
        cleared = f"clear the cache after the model's last use (`{holder.name}.cache_clear()`)"
        return f"{cleared}, or put no cache on a method of it, which keeps `self`"
    if holder is not None and holder.kind in CONTAINERS:
        moved = f"move each model of `{holder.name}` to the CPU (.cpu()), and back to the GPU while it is used"
        return f"{moved}; delete its optimizer" if has_state else moved
    what, them = ("the model and its optimizer", "them") if has_state else ("the model", "it")
    if holder is not None and holder.kind and not any(one.class_name == holder.kind for one in trace.modules):
        how = f"set the attribute of `{holder.name}` to None, or delete `{holder.name}`"
        return f"drop {what} before the next one is built: {how}"
    if holder is not None and holder.name.isidentifier() and not has_state:
        return f"delete the model after its last use (`del {holder.name}`), or move it to host memory (.cpu())"
    return f"delete {what}, or move {them} to the host"


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
            kind = EditKind.RETRY_AFTER_HANDLER
        else:
            by = f"the traceback of {_format_holder(holder)}"
            fix = f"keep no exception in `{holder.name}`: its text, str(error), is enough"
            kind = EditKind.KEEP_ERROR_TEXT
        what = f"tensors of an attempt that ran out of memory, kept by {by}"
        edit = None if holder.source is None else Edit(kind, holder.source, holder.name)
        groups.append(_Group(what, fix, holder.source, storages, edit=edit))
    return groups


def _count_models(context: Context, parameters: Iterable[int]) -> int:
    """Return the number of models that `parameters` belong to: of those of one line and shape, the ones between which
    the program has computed. The parameters with the most bytes count: a latent that is optimized is no model."""
    trace, births = context.ledger.trace, context.lifetimes.births
    # A forward that begins without a call only makes tensors, as between the parameters that are added to a model.
    trained = {time for time, phase in context.phases if phase.kind in (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)}
    computed = sorted(trained.union(forward.end for forward in trace.forwards))
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in parameters:
        alike[*make_key(trace, index), trace.storages[index].shape, trace.storages[index].dtype].append(index)
    largest = max(alike.values(), key=context.lifetimes.sum_bytes, default=[])
    return len({bisect.bisect_left(computed, births[index]) for index in largest})


def _is_kept_on_purpose(context: Context, holder: Holder, members: Sequence[int]) -> bool:
    """Return whether a program keeps `members` on purpose: in a cache of limited size, or in a window of steps, which
    has more of them at a time than the holder that was seen in one step."""
    num_held = len(set(members).intersection(holder.storages))
    last_uses = {index: context.ledger.trace.last_uses[index] for index in members}
    return holder.limit is not None or _find_most(context, last_uses, lambda index: 1) > num_held


def _find_calls_without_backward(context: Context, storages: Sequence[int]) -> dict[int, Forward]:
    """Return storage -> the outermost call with gradients that made it, for those that no backward may have used: none
    began between the call and the last use."""
    trace, births = context.ledger.trace, context.lifetimes.births
    backwards = [time for time, phase in context.phases if phase.kind is PhaseKind.BACKWARD]
    result = {}
    for index in storages:
        position = bisect.bisect_right(trace.forwards, births[index], key=lambda forward: forward.begin) - 1
        if position < 0 or births[index] >= (call := trace.forwards[position]).end or not call.nodes:
            continue
        if bisect.bisect_left(backwards, call.end) == bisect.bisect_left(backwards, trace.last_uses[index]):
            result[index] = call
    return result


def _make_call_group(context: Context, calls: dict[int, Forward]) -> _Group:
    """Return the group of tensors that calls of one module at one line have made; `calls` maps them to their calls."""
    trace, call = context.ledger.trace, next(iter(calls.values()))
    num_calls = len({calls[index] for index in context.lifetimes.find_max_live(calls).storages})  # at a time
    name, source = trace.modules[call.module].class_name, trace.source_at(call.source)
    what = f"the graph of {plural(num_calls, 'call')} of {name} at {file_and_line(source)}, which no backward has used"
    fix = "call it under torch.no_grad() if no backward follows, or drop what it returns"
    edit = None if source is None else Edit(EditKind.NO_GRADIENTS, source)
    return _Group(what, fix, source, list(calls), edit=edit)


_LOAD_FIX = 'load it with map_location="cpu"'


def _make_load_edit(trace: Trace, storages: Sequence[int]) -> Edit | None:
    """Return the edit of the line that loads `storages`; None for what torch.load has not made."""
    largest = trace.storages[max(storages, key=lambda index: trace.storages[index].num_bytes)]
    source = trace.source_line(largest)
    return None if trace.op(largest) != "torch.load" or source is None else Edit(EditKind.LOAD_ON_HOST, source)


def _make_line_group(trace: Trace, storages: list[int]) -> _Group:
    """Return the group of tensors that one operator at one line made, and whose holder was not seen."""
    storage = trace.storages[storages[0]]
    made = f"the result of {trace.op(storage).removeprefix('aten.')} at {file_and_line(trace.source_line(storage))}"
    edit = _make_load_edit(trace, storages)
    fix = "`del` what is made here after its last use" if edit is None else _LOAD_FIX
    return _Group(made, fix, find_own_line(trace, storages[0]), storages, edit=edit)


def _make_snapshot_group(trace: Trace, holder: Holder | None, storages: list[int]) -> _Group:
    """Return the group of copies of a state that one line has made, and `holder` keeps, if one was seen."""
    line = find_own_line(trace, storages[0])
    by = f"made at {file_and_line(line)}" if holder is None else f"in {_format_holder(holder)}"
    fix = "keep this copy in host memory (.cpu() of each tensor) or in a file, until it is needed"
    what = "a copy of the model's state"
    return _Group(f"{what} {by}", fix, line, storages, is_snapshot=True, name=what)


def _make_holder_group(trace: Trace, holder: Holder, storages: list[int]) -> _Group:
    """Return the group of tensors that `holder` keeps."""
    if holder.is_cycle:
        what = f"the program has dropped them, and {_format_holder(holder)}, keeps them until garbage is collected"
        note = "Python's garbage collector runs after so many new objects, thus with a GPU at other moments than here"
        fix, edit = CYCLE_FIXES[CycleKind(holder.kind)], make_holder_edit(trace, holder, None)
        return _Group(what, fix, holder.source, storages, note=note, edit=edit)
    edit = _make_load_edit(trace, storages)
    variable = holder.name.partition("[")[0]
    is_variable = "." not in variable and (not holder.kind or edit is not None)
    fix = (
        f"`del {variable}` after the last use"
        if is_variable
        else f"drop the tensors of `{holder.name}` after their use"
    )
    taken = _find_taken(trace, max(storages, key=lambda index: trace.storages[index].num_bytes))
    if edit is not None:
        fix = _LOAD_FIX
    elif taken is not None:
        line, shape = file_and_line(trace.source_line(taken)), format_shape(taken.shape)
        fix = f"index first, and compute only the elements that {line} takes ({shape})"
    elif is_variable and holder.source is not None:
        edit = Edit(EditKind.DELETE, holder.source, variable)
    saves_more = edit is None and taken is not None
    return _Group(_format_holder(holder), fix, holder.source, storages, edit=edit, holder=holder, saves_more=saves_more)


def _find_taken(trace: Trace, index: int) -> Storage | None:
    """Return what was gathered of the storage `index` in its last use, if that is at most 1 / MIN_TIMES of it."""
    used, storage = trace.last_uses[index], trace.storages[index]
    near = (event.ref for event in trace.events[max(used - 1, 0) : used + 1] if event.kind is EventKind.ALLOC)
    results = (trace.storages[ref] for ref in near if ref > index)
    return next(
        (
            one
            for one in results
            if trace.op(one) in GATHERS and len(one.shape) == len(storage.shape) and one.dtype == storage.dtype
            if one.num_bytes * MIN_TIMES <= storage.num_bytes
        ),
        None,
    )


def _format_holder(holder: Holder) -> str:
    """Return the holder with its line, for the title: "variable `out` (train.py:10)"."""
    place = "" if holder.source is None else f" ({file_and_line(holder.source)})"
    return f"{describe_holder(holder)}{place}"


def _make_finding(context: Context, group: _Group) -> Finding | None:
    ledger, lifetimes = context.ledger, context.lifetimes
    trace = ledger.trace
    births, uses = lifetimes.births, trace.last_uses
    frees = {i: births[i] + 1 if group.is_snapshot or uses[i] == NONE else uses[i] for i in group.storages}
    saved = lifetimes.peak_reduction(
        [Saving(used, lifetimes.deaths[i], lifetimes.sum_bytes([i])) for i, used in frees.items()]
    )
    kept = _find_most(context, frees, lambda index: lifetimes.sum_bytes([index]))
    needs = None
    is_at_peak = saved >= MIN_BYTES and saved >= MIN_SHARE * ledger.peak_bytes
    if is_at_peak or _sum_idle_bytes(context, frees) >= MIN_BYTES:
        needs = compute_needs_with_frees(context, frees)
    if group.is_unused:  # it is not built at all
        needs = compute_needs_of(context, resize(trace, dict.fromkeys(group.storages, 0)))
    if not is_at_peak and not is_decisive(context, needs):
        needs = None
        if not group.is_model or kept < MIN_MODEL_BYTES:
            return None
    where = "" if group.is_snapshot or group.is_unused else _format_last_use(context, max(frees.values()))
    shown = _sum_idle_bytes(context, frees) or kept  # where memory runs out, some may be gone that once lay beside
    predicate = "are computed, and few of them used" if group.saves_more else "stay on the GPU after their last use"
    predicate = "are on the GPU and were not used" if group.is_unused else predicate
    title = f"{format_bytes(shown)} {predicate}: {group.description}"
    effect = Evidence("the run's peak is at another moment, and the same without it")
    if needs is not None:
        change = name_other_place(context) if group.is_snapshot else "freed after its last use"
        change = "without it" if group.is_unused else change
        effect = effect_evidence(context, needs, change)
    if group.saves_more:
        effect = replace(effect, required_bytes=None)
    evidence = (
        Evidence(f"fix: {group.fix}", source=group.source),
        effect,
        *([Evidence(group.note)] if group.note else []),
        *_make_tensor_evidence(context, group.storages),
        *([Evidence(where)] if where else []),
    )
    severity = Severity.NOTE if needs is None else Severity.WARNING
    num_bytes = saved if is_at_peak else kept
    decisive = is_decisive(context, needs)
    name = group.name if group.holder is None else describe_holder(group.holder)
    culprit = Culprit(name, frozenset(group.storages)) if name else None
    return Finding(
        "idle-memory", severity, title, num_bytes, evidence, (), is_decisive=decisive, edit=group.edit, culprit=culprit
    )


def _sum_idle_bytes(context: Context, frees: dict[int, int]) -> int:
    """Return the bytes of the storages that are kept after their event in `frees`, where memory runs out."""
    oom = context.ledger.out_of_memory
    if oom is None:
        return 0
    return context.lifetimes.find_live(
        oom.event, [index for index, used in frees.items() if used <= oom.event]
    ).num_bytes


def _format_last_use(context: Context, event: int) -> str:
    """Return the stage of the last use, as evidence; a stage that allocates nothing has its phase's name."""
    stages = [span for span in context.ledger.spans if span.begin < event <= span.end]
    if stages:
        name, step, micro_batch = stages[0].name, stages[0].step, stages[0].micro_batch
    else:
        kind, step, micro_batch = find_phase(context.phases, event)
        name = kind.value
    if name == PhaseKind.OTHER.value:
        return ""
    return f"last used in {format_stage(describe_name(name), step, micro_batch)}"


def _find_most(context: Context, frees: dict[int, int], measure: Callable[[int], int]) -> int:
    """Return the largest sum of `measure` over the storages that are kept at one moment after their event in `frees`,
    such as that of their last use."""
    changes = []
    for index, event in frees.items():
        amount = measure(index)
        changes += [(event, amount), (context.lifetimes.deaths[index], -amount)]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _make_tensor_evidence(context: Context, storages: Iterable[int]) -> list[Evidence]:
    """Return evidence of the kinds of tensors with the most bytes."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in storages:
        kinds[trace.storages[index].shape, trace.storages[index].dtype, *make_key(trace, index)].append(index)
    result = []
    for members in sorted(kinds.values(), key=lambda members: -lifetimes.sum_bytes(members))[:_MOST_SHOWN]:
        storage = trace.storages[members[0]]
        text = (
            f"{plural(len(members), 'tensor')} {format_shape(storage.shape)} {storage.dtype} by {trace.op(storage)} at "
            f"{file_and_line(trace.source_line(storage))}"
        )
        result.append(tensor_evidence(trace, members[0], text, num_bytes=lifetimes.sum_bytes(members)))
    return result
