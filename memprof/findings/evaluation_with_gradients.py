"""Rule `evaluation-with-gradients`: a model that is not trained saves tensors for a backward pass that never runs."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from memprof.findings.calls import find_call_loops, find_training_events, new_storages
from memprof.findings.edits import Edit, EditKind
from memprof.findings.effect import compute_needs_without, effect_evidence, is_decisive
from memprof.findings.evidence import file_and_line, format_shape, module_pattern, plural, tensor_evidence
from memprof.findings.finding import Context, Culprit, Evidence, Finding, Severity, cache_per_context, rule
from memprof.findings.growth import (
    LeakGroup,
    by_holder,
    find_leaks,
    format_holders,
    holder_evidence,
    leak_evidence,
    make_key,
)
from memprof.findings.growth_until_peak import find_sum_of_calls
from memprof.trace.events import NONE, Forward, Holder, PhaseKind, Trace
from memprof.units import format_bytes

# Calls at least, where memory ran out: fewer may be of a loss, whose backward was to come (perceptual losses).
MIN_CALLS_OF_AN_EVALUATION = 8

MIN_BYTES = 64 << 10  # of saved tensors live at once, or growth per call without a graph: less is a decoder's tokens

WARNING_SHARE = 0.05  # of the peak: less is only a note


@rule(70)
def find(context: Context) -> list[Finding]:
    """Return one finding per module; `num_bytes` is the peak of its saved tensors, without outputs.

    Conditions: the module was in eval mode, or the program's code does not train; autograd created nodes for the call;
    and all tensors saved by the call were freed before the next backward pass began (or the program ended without one
    after at least two such calls, or, where its code does not train, one).
    """
    found = _find_kept_graphs(context)
    by_line: dict[int, list[int]] = {}  # one line may call several modules: its change is for all of them
    for kept in found:
        by_line.setdefault(kept.source, []).extend(kept.saved)
    return [_make_finding(context, kept, by_line[kept.source]) for kept in found]


def find_covered_storages(context: Context) -> frozenset[int]:
    """Return the storages that the findings of this rule are about, which are no other finding's."""
    return frozenset().union(*(kept.storages for kept in _find_kept_graphs(context)))


class _KeptGraphs(NamedTuple):
    """Graphs of the calls of one module, kept for a backward that never comes."""

    loops: list[list[Forward]]
    saved: list[int]  # storages that the calls have saved, without outputs, unless a graph alone keeps these
    num_bytes: int  # the peak of these
    groups: dict[Holder | None, list[LeakGroup]]  # what accumulates over the calls of the longest loop
    storages: frozenset[int]  # what the calls have saved, and what accumulates

    @property
    def source(self) -> int:
        """Return the line of the calls: that of the first."""
        return self.loops[0][0].source


@cache_per_context
def _find_kept_graphs(context: Context) -> list[_KeptGraphs]:
    """Return the kept graphs of each module that is called with gradients and not trained."""
    trace = context.ledger.trace
    training_events = find_training_events(trace)
    by_module: dict[int, list[list[Forward]]] = {}
    # The call in which memory ran out counts only if no backward may have been to come.
    failed = trace.failed_forward
    is_evaluation = failed is not None and _is_switched(trace, [failed])
    calls = trace.list_calls() if is_evaluation or not trace.may_train else trace.forwards
    for loop in find_call_loops(calls, trace, lambda call: call.nodes > 0 and not (call.training and trace.may_train)):
        by_module.setdefault(loop[0].module, []).extend(_split_trained(context, loop, training_events))
    result = []
    for all_loops in by_module.values():
        saved: list[int] = []
        loops: list[list[Forward]] = []
        trained: set[int] = set()  # lines of a few calls that a backward has used
        for loop in all_loops:
            saved_in_loop = _list_saved_storages(context, loop)
            last_free = _find_last_free(context, saved_in_loop)
            if bisect.bisect(training_events, loop[0].begin) != bisect.bisect(training_events, last_free):
                trained |= {forward.source for forward in loop if len(loop) < MIN_CALLS_OF_AN_EVALUATION}
            elif not _may_be_of_a_loss(context, loop, last_free, trained):
                saved += saved_in_loop
                loops.append(loop)
        num_bytes = context.lifetimes.find_max_live(saved).num_bytes
        if num_bytes < MIN_BYTES:
            continue
        made = {id(loop): new_storages(context, loop[0].begin, loop[-1].end) for loop in loops}
        longest = max(loops, key=len)
        ends = [forward.end - 1 for forward in longest if forward is not trace.failed_forward]  # it left nothing yet
        leaks = find_leaks(context, made[id(longest)], ends)
        groups = _select_reported_groups(by_holder(trace, leaks))
        if None in groups and (holder := find_sum_of_calls(trace, ends)) is not None:
            groups = {holder: [leak for group in groups.values() for leak in group]}
        keys = {leak.key for group in groups.values() for leak in group}
        growing = (index for indices in made.values() for index in indices if make_key(trace, index) in keys)
        storages = frozenset(saved).union(growing)
        if any(holder is not None and not holder.kind and holder.nodes for holder in groups):
            # A sum keeps outputs, and what losses save, by its graph alone.
            saved = sorted(storages)
            num_bytes = context.lifetimes.find_max_live(saved).num_bytes
        result.append(_KeptGraphs(loops, saved, num_bytes, groups, storages))
    return result


def _split_trained(context: Context, loop: list[Forward], training_events: list[int]) -> list[list[Forward]]:
    """Return `loop`, in parts by the lines of its calls if a backward has used some: a loss may call a model for its
    target too, and drop that graph."""
    last_free = _find_last_free(context, _list_saved_storages(context, loop))
    if bisect.bisect(training_events, loop[0].begin) == bisect.bisect(training_events, last_free):
        return [loop]
    by_line: dict[int, list[Forward]] = {}
    for forward in loop:
        by_line.setdefault(forward.source, []).append(forward)
    return list(by_line.values())


def _find_last_free(context: Context, storages: list[int]) -> int:
    return max((context.lifetimes.deaths[index] for index in storages), default=0)


def _list_saved_storages(context: Context, loop: list[Forward]) -> list[int]:
    """Return the storages that the calls of `loop` saved, without outputs; and the KV caches that later calls have
    used: each has made new ones of them, and the program has these."""
    deaths, last_uses = context.lifetimes.deaths, context.ledger.trace.last_uses
    saved = []
    for forward in loop:
        made = new_storages(context, forward.begin, forward.end)
        saved += [index for index in made if deaths[index] >= forward.end and index not in forward.outputs]
        caches = new_storages(context, forward.begin, forward.end, caches=True)
        saved += [index for index in caches if last_uses and last_uses[index] >= forward.end]
    return saved


def _may_be_of_a_loss(context: Context, loop: list[Forward], last_free: int, trained: set[int]) -> bool:
    """Return whether a backward may have been to come for calls whose tensors were there when the run ended: one call,
    or a run that failed; where memory ended it, calls of a line that had a backward in a step before, or a few while an
    optimizer waits for its first step."""
    trace, oom = context.ledger.trace, context.ledger.out_of_memory
    if not trace.may_train or _is_switched(trace, loop):
        return False
    if last_free == len(trace.events) and (len(loop) < 2 or trace.failure is not None):
        return True
    if oom is None or not trace.ended_out_of_memory or last_free < oom.event:
        return False
    waits = bool(trace.first_steps) and len(loop) < MIN_CALLS_OF_AN_EVALUATION
    return waits or not trained.isdisjoint(forward.source for forward in loop)


def _is_switched(trace: Trace, loop: list[Forward]) -> bool:
    """Return whether memory ran out after the program had trained a model, switched it to eval mode, and then called it
    from lines that have not trained it, once at least: in an evaluation."""
    module, begin = loop[0].module, loop[0].begin
    trained = [
        one for one in trace.forwards if one.module == module and one.training and one.nodes and one.end <= begin
    ]
    if not trained or not trace.ended_out_of_memory or any(one.training for one in loop):
        return False
    stepped = [time for time, phase in trace.list_phase_begins() if phase.kind is PhaseKind.OPTIMIZER_STEP]
    switched = [call for call in trace.eval_calls if call.module == module and call.event <= begin]
    if not switched or not any(trained[-1].end <= time <= switched[-1].event for time in stepped):
        return False
    if {one.source for one in trained}.isdisjoint(one.source for one in loop):
        return True
    # One method of the model calls this module for both: the function that has switched it calls that method.
    function, callers = _find_function(trace, switched[-1].source), {one.caller for one in loop}
    is_of_it = all(_find_function(trace, caller) == function for caller in callers)
    return function is not None and is_of_it and callers.isdisjoint(one.caller for one in trained)


def _find_function(trace: Trace, source: int) -> tuple[str, str] | None:
    """Return the file and the name of the function that a line is of."""
    line = trace.source_at(source)
    return None if line is None else (_split_source(line)[0], _split_source(line)[2])


def _make_finding(context: Context, kept: _KeptGraphs, saved_at_line: list[int]) -> Finding:
    trace, num_bytes, groups = context.ledger.trace, kept.num_bytes, kept.groups
    calls = [forward for loop in kept.loops for forward in loop]
    name = trace.modules[calls[0].module].class_name
    at_line = [one for one in trace.forwards if one.training and one.source == calls[0].source]
    is_of_method = bool(at_line) and {one.caller for one in calls}.isdisjoint({NONE, *(one.caller for one in at_line)})
    trains_too = trace.may_train and bool(at_line) and not is_of_method
    source = trace.source_at(calls[0].caller if is_of_method else calls[0].source)
    line = file_and_line(source)
    mode = "" if any(call.training for call in calls) else " in eval mode"
    saves = "saves" if len(calls) == 1 else "save"
    unused = _find_unused_no_grad(trace, source)
    why = "" if unused is None else f" (it does nothing at {file_and_line(unused)} without `with`)"
    num_live = _count_live(context, calls, kept.saved)
    of_all = "" if num_live in (1, len(calls)) else f"{num_live:,} of "
    together = "" if len(calls) == 1 else " each" if num_live == 1 else " together"
    kept_by = format_holders(*groups, verb="; their graphs are kept by")
    title = (
        f"No torch.no_grad(){why}: {of_all}{plural(len(calls), 'call')} of {name}{mode} at {line} {saves} up to "
        f"{format_bytes(num_bytes)} of activations{together}, and no backward uses them{kept_by}"
    )
    nodes = max(forward.nodes for forward in calls)
    evidence = [
        Evidence(f"each call makes {plural(nodes, 'autograd node')}, and no backward reaches them", source=source)
    ]
    evidence += _make_growth_evidence(context, max(kept.loops, key=len), groups)
    needs = None
    if context.ledger.trace.last_uses and not context.ledger.run.fits:
        needs = compute_needs_without(context, saved_at_line)
        evidence.append(effect_evidence(context, needs))
    if unused is not None:
        how = "put the calls under `with torch.no_grad():`; without `with` it does nothing"
        fix = f"fix at {file_and_line(unused)}: {how}"
        evidence.append(Evidence(fix, source=unused))
    elif trains_too:
        evidence.append(Evidence("fix: call it under torch.no_grad() where no backward follows"))
    else:
        fix = f"fix: call it under torch.no_grad() at {line}"
        evidence.append(Evidence(fix, source=source))
    decides = is_decisive(context, needs)
    is_large = decides or num_bytes >= WARNING_SHARE * context.ledger.peak_bytes
    severity = Severity.WARNING if is_large else Severity.NOTE
    edit = None if source is None or trains_too else Edit(EditKind.NO_GRADIENTS, source)
    return Finding(
        "evaluation-with-gradients",
        severity,
        title,
        num_bytes,
        tuple(evidence),
        (),
        is_decisive=decides,
        edit=edit,
        culprit=Culprit(f"activations of {plural(num_live, 'call')}", frozenset(kept.saved)),
    )


def _count_live(context: Context, calls: list[Forward], saved: list[int]) -> int:
    """Return the calls of which something is among the `saved` tensors where these have the most bytes."""
    births = sorted(context.lifetimes.births[index] for index in context.lifetimes.find_max_live(saved).storages)
    return sum(bisect.bisect_left(births, one.begin) < bisect.bisect_left(births, one.end) for one in calls)


def _find_unused_no_grad(trace: Trace, source: str | None) -> str | None:
    """Return the last call of torch.no_grad() without `with` before the line `source` in its function, else the only
    one in its file."""
    if source is None:
        return None
    file, line, function = _split_source(source)
    others = [(*_split_source(one), one) for one in trace.unused_no_grads]
    before = [one for one in others if (one[0], one[2]) == (file, function) and one[1] < line]
    found = max(before, default=None) or next(iter(one for one in others if one[0] == file), None)
    return None if found is None else found[-1]


def _split_source(source: str) -> tuple[str, int, str]:
    """Return file, line and function of `source`."""
    place, _, function = source.rpartition(" ")
    file, _, line = place.rpartition(":")
    return file, int(line), function


def _select_reported_groups(groups: dict[Holder | None, list[LeakGroup]]) -> dict[Holder | None, list[LeakGroup]]:
    """Return the leaks whose holder keeps a graph or is unknown, or that grow by at least MIN_BYTES per call."""
    return {
        holder: group
        for holder, group in groups.items()
        if holder is None or holder.nodes or sum(leak.bytes_each for leak in group) >= MIN_BYTES
    }


def _make_growth_evidence(
    context: Context, loop: list[Forward], groups: dict[Holder | None, list[LeakGroup]]
) -> list[Evidence]:
    """Return evidence of the tensors that accumulate over the calls of `loop`, and of the holder of their graph."""
    trace = context.ledger.trace
    evidence = []
    for holder, group in groups.items():
        if holder is None and (cache := _make_cache_evidence(context, loop)) is not None:
            evidence.append(
                Evidence("it piles up from call to call, for the KV cache keeps keys and values with their graph:")
            )
            evidence.append(cache)
        elif holder is None:
            evidence.append(Evidence("it piles up from call to call; what keeps its graph was not seen:"))
        else:
            reason = "for the outputs are kept with their graph" if holder.nodes else "kept without a graph"
            evidence += [Evidence(f"it piles up from call to call, {reason}:"), holder_evidence(holder)]
        evidence += leak_evidence(trace, group, "call")
    return evidence


def _make_cache_evidence(context: Context, loop: list[Forward]) -> Evidence | None:
    """Return evidence of the largest KV-cache tensor of `loop` that is live after the last call.

    None if no tensor of an earlier call is live: then the KV cache keeps no autograd graph.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    cached = new_storages(context, loop[0].begin, loop[-1].end, caches=True)
    live = lifetimes.find_live(loop[-1].end - 1, cached).storages
    if all(lifetimes.births[index] >= loop[-1].begin for index in live):
        return None
    largest = max(live, key=lambda index: (trace.storages[index].num_bytes, index))
    storage = trace.storages[largest]
    num_bytes = lifetimes.sum_bytes(live)
    text = (
        f"{format_shape(storage.shape)} {storage.dtype} by {trace.op(storage)} in {module_pattern(trace, storage)} at "
        f"{file_and_line(trace.source_line(storage))}: the largest of {plural(len(live), 'tensor')} of keys and "
        f"values that are live after the last call, {format_bytes(num_bytes)} together"
    )
    return tensor_evidence(trace, largest, text, num_bytes=num_bytes)
