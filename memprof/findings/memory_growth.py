"""Rule `memory-growth`: tensors of every training step stay live, so that memory grows until the GPU is full."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from memprof.allocator import MemoryNeeds
from memprof.findings.edits import EditKind, make_carried_edit, make_holder_edit
from memprof.findings.effect import (
    compute_needs_with_frees,
    compute_needs_without,
    effect_evidence,
    is_decisive,
)
from memprof.findings.evaluation_with_gradients import find_covered_storages as find_covered_storages_of_evaluation
from memprof.findings.evidence import file_and_line, names_of, plural
from memprof.findings.exhaustion import Growth, predict_growth
from memprof.findings.finding import Context, Culprit, Evidence, Finding, Severity, cache_per_context, rule
from memprof.findings.growth import (
    CYCLE_FIXES,
    MIN_STEP_BYTES,
    LeakGroup,
    describe_holder,
    describe_tensor,
    describe_view,
    find_holder_keys,
    find_step_leaks,
    format_holders,
    holder_evidence,
    holder_fix_evidence,
    is_of_model,
    is_running_sum,
    leak_evidence,
    list_equal_sums,
    name_holders,
)
from memprof.findings.growth_until_peak import BACKWARD_PASS, CALL, STEP, GrowthUntilPeak, find_growth_until_peak
from memprof.findings.idle_storages import find_phase
from memprof.findings.proposals.second_order import find_graphs_in_vain
from memprof.ledger.steps import list_training_steps
from memprof.trace.events import CycleKind, Holder, PhaseKind, Role, Trace
from memprof.units import format_bytes

WARNING_BYTES = 1 << 20  # per step: less is only a note

_EMPTY_FIX = (
    "empty it after each {} (.clear()), and leave out retain_graph=True (each backward goes through the graphs of all "
    "before it again)"
)

MIN_LIMITED_SHARE = 0.25  # of the peak, of what a container with a maximum length has where memory runs out

_MIN_CALL_SHARE = 0.01  # of what calls keep: calls at lines that keep less, as those of a loss, are no rounds


@rule(50)
def find(context: Context) -> list[Finding]:
    """Return one finding per holder of leaked tensors; `num_bytes` is the growth from the first step's end to the last.

    The severity is an error if memory will run out. A container with a maximum length is reported only in this case, or
    where memory has run out and the container fills the GPU.
    """
    steps = list_training_steps(context.ledger.trace, context.ledger.allocated)
    growth = predict_growth(context)
    reported = _find_reported_leaks(context)
    told = {other for holder, leaks in reported.items() for other in list_equal_sums(context, holder, leaks)}
    until_peak = find_growth_until_peak(context)
    if until_peak is not None:  # a state whose graph is cut now and then does not keep that of every step
        lines = {holder.source for holder in until_peak.leaks if holder is not None and is_running_sum(holder)}
        told |= {one for one, leaks in reported.items() if one is not None and not leaks and one.source in lines}
    findings: list[Finding | None] = [
        _make_finding(context, holder, leaks, len(steps), growth)
        for holder, leaks in reported.items()
        if holder not in told
    ]
    if until_peak is not None:
        findings += [_make_finding_until_peak(context, until_peak, *leaks) for leaks in until_peak.leaks.items()]
    return [finding for finding in findings if finding is not None]


def find_covered_storages(context: Context) -> frozenset[int]:
    """Return the storages that the findings of this rule are about."""
    groups = _find_reported_leaks(context).values()
    return frozenset(index for leaks in groups for leak in leaks for index in leak.storages)


@cache_per_context
def _find_reported_leaks(context: Context) -> dict[Holder | None, list[LeakGroup]]:
    """Return holder -> leaks, without those of whole models, which `idle-memory` reports, and what is no finding."""
    trace = context.ledger.trace
    growth = predict_growth(context)
    result = {}
    for holder, leaks in find_step_leaks(context).items():
        others = [leak for leak in leaks if not is_of_model(trace, leak)]
        # None at all: a running sum, whose graph grows on the host.
        if (others or not leaks) and _is_reported(context, holder, others, growth):
            result[holder] = others
    return result


def _is_reported(context: Context, holder: Holder | None, leaks: list[LeakGroup], growth: Growth | None) -> bool:
    if holder is not None and holder.limit is not None and context.ledger.out_of_memory is not None:
        num_bytes = context.lifetimes.sum_bytes(index for leak in leaks for index in leak.storages)
        return num_bytes >= MIN_LIMITED_SHARE * context.ledger.peak_bytes
    if holder is not None and holder.limit is not None:
        return growth is not None and growth.runs_out
    return sum(leak.bytes_each for leak in leaks) >= MIN_STEP_BYTES or (holder is not None and holder.nodes > 0)


def _make_finding(
    context: Context, holder: Holder | None, leaks: list[LeakGroup], num_steps: int, growth: Growth | None
) -> Finding:
    per_step = sum(leak.bytes_each for leak in leaks)
    trace = context.ledger.trace
    others = list_equal_sums(context, holder, leaks)
    carried = _list_carried(trace, [holder, *others])
    named: Sequence[Holder | None] = carried or [holder, *others]
    evidence = [holder_evidence(one) for one in named]
    evidence += leak_evidence(trace, leaks, "step")
    needs = None
    if trace.last_uses and not context.ledger.run.fits:
        needs, change = _compute_needs(context, leaks, _list_step_ends(context), STEP)
        evidence.append(effect_evidence(context, needs, change))
    if holder is not None and holder.nodes:
        evidence.append(_make_graph_evidence(context, holder, leaks))
    if growth is not None and growth.runs_out_step is not None and per_step:
        evidence.append(Evidence(f"memory runs out at about step {growth.runs_out_step:,}"))
    kept = per_step - (_sum_saved_bytes(context, holder, leaks) if holder is not None else 0)
    is_emptied = _is_emptied(context, holder, leaks, _list_step_ends(context))
    in_vain = find_graphs_in_vain(context)
    if in_vain is not None and _are_mostly(context, leaks, in_vain.frees):
        fix = f"fix: {in_vain.change}; and detach what is carried to the next step"
        evidence.append(Evidence(fix, source=in_vain.source))
        carried = []
    elif is_emptied:
        evidence.append(holder_fix_evidence(holder, _EMPTY_FIX.format(STEP)))
    elif carried and kept < MIN_STEP_BYTES:
        evidence.append(holder_fix_evidence(holder, _make_carried_fix(context, carried, leaks, "before the next step")))
    else:
        evidence += [_make_fix_evidence(context, one, kept) for one in (holder, *others)]
    edit = None
    if carried and kept < MIN_STEP_BYTES and not is_emptied:
        edit = make_carried_edit(carried)
    elif not others and not is_emptied:
        edit = make_holder_edit(trace, holder, _choose_kind(kept))
    severity = _grade(per_step, is_cause=is_decisive(context, needs))
    if growth is not None and growth.runs_out and per_step >= MIN_STEP_BYTES:
        severity = Severity.ERROR
    num_bytes = sum(leak.num_bytes for leak in leaks) or None
    return Finding(
        "memory-growth",
        severity,
        # Of a run that memory ended too: the steps that would follow add as much as these.
        _format_title(trace, named, leaks, word="and" if carried or not leaks else "or"),
        num_bytes,
        tuple(evidence),
        (),
        is_decisive=is_decisive(context, needs),
        edit=edit,
        culprit=_name_culprit(holder, leaks, carried),
    )


def _name_culprit(holder: Holder | None, leaks: list[LeakGroup], carried: Sequence[Holder] = ()) -> Culprit | None:
    """Return what keeps `leaks`, if it was seen: `holder`, or all of `carried`."""
    storages = frozenset(index for leak in leaks for index in leak.storages)
    if holder is None or holder.is_cycle:
        return None
    return Culprit(name_holders(carried or [holder]), storages)


def _are_mostly(context: Context, leaks: list[LeakGroup], storages: Collection[int]) -> bool:
    """Return whether most bytes of `leaks` are of `storages`."""
    leaked = [index for leak in leaks for index in leak.storages]
    return 2 * context.lifetimes.sum_bytes(set(leaked).intersection(storages)) > context.lifetimes.sum_bytes(leaked)


def _list_carried(trace: Trace, holders: Sequence[Holder | None]) -> list[Holder]:
    """Return `holders`, each variable once, if they are states that one line takes from the step before, with their
    graphs, and no sums of numbers; else none."""
    states: dict[str, Holder] = {}
    for holder in holders:
        if holder is None or not is_running_sum(holder) or all(not trace.storages[i].shape for i in holder.storages):
            return []
        states.setdefault(_split_part(holder.name)[0], holder)
    if len({holder.source for holder in states.values()}) > 1:
        return []
    return sorted(states.values(), key=lambda one: -sum(trace.storages[index].num_bytes for index in one.storages))


def _split_part(name: str) -> tuple[str, bool]:
    """Return the name of the variable that a holder is a part of, and True, if its name ends with a number of a tuple;
    else the name, such as one that ends with a key."""
    variable, _, part = name.rpartition("[")
    return (variable, True) if part[:-1].isdecimal() else (name, False)


def _make_carried_fix(context: Context, carried: list[Holder], leaks: list[LeakGroup], when: str) -> str:
    """Return the change for states that are carried on with their graphs, as code for variables: an attribute's name
    begins with a class, not with the object."""
    changes = []
    for holder in carried:
        name, is_part = _split_part(holder.name)
        code = f"tuple(part.detach() for part in {name})" if is_part else f"{name}.detach()"
        changes.append(f"{name} = {code}")
    fix = f"detach {'it' if len(carried) == 1 else 'them'} {when}: {'; '.join(changes)}"
    if any("." in _split_part(holder.name)[0] for holder in carried):
        names = " and ".join(f"`{_split_part(holder.name)[0]}`" for holder in carried)
        fix = f"call .detach() on {names} {when}"
    if _are_differentiated_again(context, leaks, _list_step_ends(context)):
        return f"{fix}, and leave out retain_graph=True (the backward goes through the graphs of all steps before it)"
    return fix


def _list_step_ends(context: Context) -> list[int]:
    return [step.end for step in list_training_steps(context.ledger.trace, context.ledger.allocated)]


def _is_emptied(context: Context, holder: Holder | None, leaks: list[LeakGroup], ends: list[int]) -> bool:
    """Return whether `holder` is a container to be emptied after each of the rounds, which end after so many events."""
    is_container = holder is not None and bool(holder.kind) and not holder.is_cycle
    return is_container and _are_differentiated_again(context, leaks, ends)


def _are_differentiated_again(context: Context, leaks: list[LeakGroup], ends: list[int]) -> bool:
    """Return whether the backward of a later round uses most of `leaks`: without their graphs it would fail."""
    trace, births = context.ledger.trace, context.lifetimes.births
    if not trace.last_uses or len(ends) < 2:
        return False
    earlier = [index for leak in leaks for index in leak.storages if births[index] < ends[-2]]
    again = [
        index
        for index in earlier
        if trace.last_uses[index] > ends[bisect.bisect_right(ends, births[index])]
        and find_phase(context.phases, trace.last_uses[index]).kind is PhaseKind.BACKWARD
    ]
    return 2 * context.lifetimes.sum_bytes(again) > context.lifetimes.sum_bytes(earlier)


def _choose_kind(kept_bytes: int) -> EditKind | None:
    """Return the kind of edit of what adds so many bytes even without the autograd graph; None if those are few."""
    return EditKind.KEEP_ON_HOST if kept_bytes >= MIN_STEP_BYTES else None


def _grade(bytes_per_round: int, *, is_cause: bool) -> Severity:
    """Return the severity of growth that has not run out yet; `is_cause`: without it the run would fit."""
    return Severity.WARNING if is_cause or bytes_per_round >= WARNING_BYTES else Severity.NOTE


def _make_finding_until_peak(
    context: Context, growth: GrowthUntilPeak, holder: Holder | None, leaks: list[LeakGroup]
) -> Finding | None:
    """Return the finding of what accumulates until the peak; None if that is little, or if calls may need their graphs
    together: they are told only where a run does not fit, and would with a backward after each call."""
    storages = [index for leak in leaks for index in leak.storages]
    num_bytes, per_round = context.lifetimes.sum_bytes(storages), sum(leak.bytes_each for leak in leaks)
    needs, change, ends = None, "", [end + 1 for end in growth.ends]
    if context.ledger.trace.last_uses and not context.ledger.run.fits:
        if growth.unit == CALL:
            needs = compute_needs_with_frees(context, _find_ends_of_rounds(context, storages, ends))
            change = "with a backward() after each call"
        else:
            needs, change = _compute_needs(context, leaks, ends, growth.unit)
    if per_round < MIN_STEP_BYTES or (growth.unit == CALL and not is_decisive(context, needs)):
        return None
    evaluated = find_covered_storages_of_evaluation(context).intersection(storages)
    if growth.unit == CALL and 2 * context.lifetimes.sum_bytes(evaluated) > num_bytes:
        return None  # no backward is to come
    others = [one for one, own in growth.leaks.items() if one is not None and not own]  # joined to `holder`
    named = [] if holder is None else [holder, *(others if holder.nodes else [])]
    evidence = [holder_evidence(one) for one in named]
    if holder is None and growth.unit != CALL:
        evidence.append(holder_evidence(None))
    evidence += leak_evidence(context.ledger.trace, leaks, growth.unit)
    edit = None
    in_vain = find_graphs_in_vain(context) if growth.unit == CALL else None
    are_parts = in_vain is None or not _are_mostly(context, leaks, in_vain.frees)
    if needs is not None:
        effect = effect_evidence(context, needs, change)
        # Calls whose gradients are differentiated need each other: how many make a part is not known.
        evidence.append(effect if are_parts else replace(effect, required_bytes=None))
    if growth.unit == CALL:
        evidence.append(_make_backward_evidence(context, holder, storages))
        if in_vain is not None and not are_parts:
            evidence.append(Evidence(f"fix: {in_vain.change} (a first-order approximation)", source=in_vain.source))
    elif growth.unit == BACKWARD_PASS and _is_emptied(context, holder, leaks, ends):
        evidence.append(holder_fix_evidence(holder, _EMPTY_FIX.format("pass")))
    elif growth.unit == BACKWARD_PASS and holder is not None and holder.nodes:
        # The line of the change is that of `holder`, if it fills it, or is the only one that is named.
        is_assigned = len(named) == 1 and holder.source is not None and not holder.fills
        lines = [None if one is holder and (one.fills or is_assigned) else one.source for one in named]
        places = ["" if line is None else f" ({file_and_line(line)})" for line in lines]
        states = [f"what {describe_holder(one)} keeps" if one.kind else f"`{one.name}`" for one in named]
        what = " and ".join(f"{state}{place}" for state, place in zip(states, places, strict=True))
        if is_assigned:  # as one of several states, of which each has the graphs of all
            what += " and on what else is assigned here"
        fix = f"call .detach() on {what} after each pass"
        if _are_differentiated_again(context, leaks, ends):
            fix += ", and leave out retain_graph=True"
        evidence.append(holder_fix_evidence(holder, fix, holder.source if is_assigned else None))
        edit = None if others else make_holder_edit(context.ledger.trace, holder, EditKind.KEEP_DETACHED)
    elif carried := _list_carried(context.ledger.trace, [holder]):
        when = f"after each step, or after fewer than {growth.rounds}"
        evidence.append(holder_fix_evidence(holder, _make_carried_fix(context, carried, leaks, when)))
        edit = make_carried_edit(carried)
    else:
        evidence.append(_make_fix_evidence(context, holder, per_round, growth.unit))
        edit = make_holder_edit(context.ledger.trace, holder, _choose_kind(per_round))
    culprit, graphs = _name_culprit(holder, leaks, [one for one in named if not one.kind]), ""
    if growth.unit == CALL:
        graphs = f": the graphs of {growth.rounds:,} calls wait for one backward"
        culprit = Culprit(f"graphs of {growth.rounds:,} calls", frozenset(storages))
    title = (
        f"Memory grows by {format_bytes(per_round)} a {growth.unit}, to {format_bytes(num_bytes)}{graphs}"
        f"{format_holders(*named)}"
    )
    return Finding(
        "memory-growth",
        _grade(per_round, is_cause=is_decisive(context, needs)),
        title,
        num_bytes,
        tuple(evidence),
        (),
        is_decisive=is_decisive(context, needs),
        edit=edit,
        culprit=culprit,
    )


def _find_ends_of_rounds(context: Context, storages: Iterable[int], ends: list[int]) -> dict[int, int]:
    """Return storage -> the event after the round that made it, of the `storages` whose rounds have ended; `ends` are
    the events after each round."""
    births = context.lifetimes.births
    return {index: ends[bisect.bisect_right(ends, births[index])] for index in storages if births[index] < ends[-1]}


def _compute_needs(context: Context, leaks: list[LeakGroup], ends: list[int], unit: str) -> tuple[MemoryNeeds, str]:
    """Return what the run needs without `leaks`, and the change in words: each is freed after its last use, or after
    the round that made it if only the graph that is to be cut there is what uses it later."""
    storages = [index for leak in leaks for index in leak.storages]
    if _are_differentiated_again(context, leaks, ends):
        needs = compute_needs_with_frees(context, _find_ends_of_rounds(context, storages, ends))
        return needs, f"freed after the {unit} that makes it"
    return compute_needs_without(context, storages), "freed after its last use"


def _make_backward_evidence(context: Context, holder: Holder | None, storages: list[int]) -> Evidence:
    """Return evidence with the fix for calls whose graphs wait for one backward pass: at the line of their sum, else of
    the calls that make `storages`, if it is one."""
    trace, births = context.ledger.trace, context.lifetimes.births
    sizes: Counter[int] = Counter()
    for forward in trace.forwards:
        made = [index for index in storages if forward.begin <= births[index] < forward.end]
        sizes[forward.source] += context.lifetimes.sum_bytes(made)
    sources = [source for source, num_bytes in sizes.items() if num_bytes >= _MIN_CALL_SHARE * sizes.total()]
    # A round is several calls, such as the inner steps of a task and what is asked of it then.
    if (holder is not None and holder.fills) or len(sources) > 1:
        fix = "call backward() for each part's loss (task, chunk), not once for their sum, if no part needs another"
        return holder_fix_evidence(holder, fix)
    source = trace.source_at(sources[0])
    return Evidence(f"fix: make fewer calls at {file_and_line(source)} before each backward()", source=source)


def _format_title(trace: Trace, holders: Sequence[Holder | None], leaks: list[LeakGroup], *, word: str) -> str:
    kept_by, bytes_per_step = format_holders(*holders, word=word), sum(leak.bytes_each for leak in leaks)
    if not bytes_per_step:
        return f"The graph of every step stays alive{kept_by}: in host memory, with no tensors on the GPU"
    growth_text = f"Memory grows by {format_bytes(bytes_per_step)} a step"
    largest = max(leaks, key=lambda leak: leak.bytes_each)
    kind = f", mostly {describe_tensor(trace, largest)}" if 2 * largest.bytes_each >= bytes_per_step else ""
    return f"{growth_text}{kind}{kept_by}" if kind or kept_by else f"{growth_text}: tensors of each step stay alive"


def _make_graph_evidence(context: Context, holder: Holder, leaks: list[LeakGroup]) -> Evidence:
    """Return evidence of the autograd graph that `holder` keeps alive, and of the tensors that the graph saves."""
    steps = plural(holder.node_steps, "step")
    nodes = f"an autograd graph hangs on it: {plural(holder.nodes, 'node')} from {steps} when it was looked at"
    saved_bytes = _sum_saved_bytes(context, holder, leaks)
    if saved_bytes:
        text = f"{nodes}; what it saved for a backward is live with it: {format_bytes(saved_bytes)} a step"
    else:
        text = f"{nodes}; backward has freed what it saved, so that it takes host memory alone"
    return Evidence(text, num_bytes=saved_bytes or None, source=holder.source)


def _sum_saved_bytes(context: Context, holder: Holder, leaks: list[LeakGroup]) -> int:
    """Return the bytes per step that the holder's autograd graph keeps: leaks not held by the holder itself.

    A variable holds one tensor: others of the same operator and line, as the state and the reserve of cuDNN, are not
    its own.
    """
    if not holder.nodes:
        return 0
    keys, num_held = find_holder_keys(context.ledger.trace, holder), len(holder.storages)
    is_variable = not holder.kind
    return sum(
        leak.bytes_each for leak in leaks if leak.key not in keys or (is_variable and len(leak.storages) > num_held)
    )


def _make_fix_evidence(context: Context, holder: Holder | None, kept_bytes: int, unit: str = STEP) -> Evidence:
    """Return evidence with the fix. `kept_bytes`: what a `unit` adds even without the autograd graph (`detach`)."""
    trace = context.ledger.trace
    if holder is not None and holder.is_cycle:
        fix = CYCLE_FIXES[CycleKind(holder.kind)]
    elif _keeps_copies(context, holder):
        fix = "keep these copies in host memory (.cpu()), or in a file"
    elif kept_bytes >= MIN_STEP_BYTES and (view := describe_view(trace, holder)) is not None:
        fix = f"keep .detach().clone() or .detach().cpu() of it: {view}"
    elif kept_bytes >= MIN_STEP_BYTES:
        fix = f"keep the tensors of each {unit} in host memory (.detach().cpu()), or drop those that are not needed"
    elif _is_sum_of_vectors(trace, holder):
        fix = "keep the tensor without its graph (.detach())"
    else:
        fix = "keep the number (.item()), or the tensor without its graph (.detach())"
    return holder_fix_evidence(holder, fix)


def _keeps_copies(context: Context, holder: Holder | None) -> bool:
    """Return whether `holder` keeps copies of models, of their states or of their gradients: clones of several shapes,
    with those of half of the parameters at least."""
    if holder is None or not holder.kind:
        return False
    trace = context.ledger.trace
    shapes = {trace.storages[index].shape for index in names_of(trace, Role.PARAMETER)}
    kept = [trace.storages[index] for index in holder.storages]
    cloned = {storage.shape for storage in kept if trace.op(storage) == "aten.clone"}
    return len(cloned) > 1 and 2 * len(cloned & shapes) >= len(shapes)


def _is_sum_of_vectors(trace: Trace, holder: Holder | None) -> bool:
    """Return whether `holder` is a running sum, and its tensors are no numbers."""
    if holder is None or not is_running_sum(holder) or not holder.storages:
        return False
    return all(trace.storages[index].shape for index in holder.storages)
