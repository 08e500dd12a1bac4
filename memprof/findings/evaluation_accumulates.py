"""Rule `evaluation-accumulates`: an evaluation loop keeps the outputs of all its batches on the GPU, mostly logits."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Set
from typing import NamedTuple

from memprof.allocator import MemoryNeeds
from memprof.findings import growth
from memprof.findings.calls import find_call_loops, new_storages
from memprof.findings.edits import EditKind, make_holder_edit
from memprof.findings.effect import compute_needs_of, effect_evidence, has_host_memory, is_decisive, name_other_place
from memprof.findings.evaluation_with_gradients import find_covered_storages
from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context, Culprit, Evidence, Finding, Severity, cache_per_context, rule
from memprof.ledger.categories import Category
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, Forward, Holder, Role
from memprof.units import format_bytes

MIN_BYTES = 64 << 10  # per call: less is a decoder's tokens, or a metric

WARNING_BYTES = 1 << 20  # per call: less is only a note

TRAINER = "transformers/trainer"  # in the paths of its Trainer
_MOVING = "aten._to_copy"


class _KeptByLoop(NamedTuple):
    """The tensors that accumulate over the calls of one loop, by their holders, with their keys."""

    loop: list[Forward]
    holders: dict[Holder | None, list[growth.LeakGroup]]
    keys: frozenset[growth.Key]
    storages: frozenset[int]


@rule(60)
def find(context: Context) -> list[Finding]:
    """Return one finding per evaluated module; `num_bytes`: bytes left live by the loop that leaves the most, and by
    other loops of the same tensors, such as the evaluations of earlier epochs.

    It is decisive if the run would fit with these in host memory. Outputs of the model and tensors created outside
    modules count; so do tensors created inside modules, as of hooks, and KV caches, if no later call uses them, and
    something was seen to keep them, or the model is in training mode. Tensors that the rule `memory-growth` reports do
    not.
    """
    by_module: dict[int, list[_KeptByLoop]] = defaultdict(list)
    modules: dict[frozenset[growth.Key], int] = {}  # the first that tensors are told of: others are parts of its model
    for loop, reported in _find_kept(context):
        keys = frozenset(leak.key for leaks in reported.values() for leak in leaks)
        if modules.setdefault(keys, loop[0].module) == loop[0].module:
            storages = frozenset(index for leaks in reported.values() for leak in leaks for index in leak.storages)
            by_module[loop[0].module].append(_KeptByLoop(loop, reported, keys, storages))
    return [_make_finding(context, loops) for loops in by_module.values()]


def find_kept_keys(context: Context) -> set[growth.Key]:
    """Return the keys of the tensors that accumulate over calls: smaller batches make more calls, and keep as much."""
    return {leak.key for _, reported in _find_kept(context) for leaks in reported.values() for leak in leaks}


def find_kept_storages(context: Context) -> frozenset[int]:
    """Return the storages that the findings of this rule are about, which are no other finding's."""
    return frozenset(
        index
        for _, reported in _find_kept(context)
        for leaks in reported.values()
        for leak in leaks
        for index in leak.storages
    )


@cache_per_context
def _find_kept(context: Context) -> list[tuple[list[Forward], dict[Holder | None, list[growth.LeakGroup]]]]:
    """Return the loops of calls over which tensors accumulate, each with these by what keeps them."""
    trace = context.ledger.trace
    found = []
    held = {growth.make_key(trace, index) for holder in trace.holders for index in holder.storages}
    for loop in find_call_loops(trace.forwards, trace, lambda forward: forward.nodes == 0):
        outputs = {index for forward in loop for index in forward.outputs}
        candidates = [
            index
            for index in new_storages(context, loop[0].begin, loop[-1].end)
            if trace.storages[index].module == NONE or index in outputs or _is_kept_unused(context, index, loop, held)
        ]
        # What is kept of each round may be the input of the next: the images of a sampler.
        candidates += [
            index
            for index, owner in trace.owners.items()
            if owner.role is Role.INPUT
            and loop[0].begin <= context.lifetimes.births[index] < loop[-1].end
            and growth.make_key(trace, index) in held
        ]
        caches = new_storages(context, loop[0].begin, loop[-1].end, caches=True)
        candidates += [
            index
            for index in caches
            if growth.make_key(trace, index) in held and _is_unused_later(context, index, loop)
        ]
        candidates = [index for index in candidates if index not in find_covered_storages(context)]
        groups = growth.by_holder(trace, growth.find_leaks(context, candidates, [forward.end - 1 for forward in loop]))
        reported_keys = {growth.holder_key(holder) for holder in growth.find_step_leaks(context)} if groups else set()
        reported = {
            holder: leaks
            for holder, leaks in groups.items()
            if _sum_bytes_per_call(leaks) >= MIN_BYTES
            and (holder is None or (holder.limit is None and growth.holder_key(holder) not in reported_keys))
        }
        if reported:
            found.append((loop, reported))
    return found


def _is_kept_unused(context: Context, index: int, loop: list[Forward], held: Set[growth.Key]) -> bool:
    """Return whether no operator uses the storage `index` after its call, which is in training mode, or the program was
    seen to keep such tensors (`held`).

    In eval mode a model may keep a cache of its own, to be read in calls that the run did not come to.
    """
    is_held = growth.make_key(context.ledger.trace, index) in held
    return (is_held or _find_call(context, index, loop).training) and _is_unused_later(context, index, loop)


def _is_unused_later(context: Context, index: int, loop: list[Forward]) -> bool:
    """Return whether no operator uses the storage `index` after the call in which it was allocated."""
    last_uses = context.ledger.trace.last_uses
    return bool(last_uses) and last_uses[index] <= _find_call(context, index, loop).end


def _find_call(context: Context, index: int, loop: list[Forward]) -> Forward:
    """Return the call of `loop` in which, or before which, the storage `index` was allocated."""
    return loop[bisect.bisect_right(loop, context.lifetimes.births[index], key=lambda forward: forward.end)]


def _sum_bytes_per_call(leaks: list[growth.LeakGroup]) -> int:
    return sum(leak.bytes_each for leak in leaks)


def _count_calls(context: Context, kept: _KeptByLoop, live: Collection[int]) -> int:
    """Return the calls of which something is kept among the storages `live`: that of the last may not be yet."""
    per_call = sum(map(_sum_bytes_per_call, kept.holders.values()))
    num_bytes = context.lifetimes.sum_bytes(kept.storages.intersection(live))
    return min(len(kept.loop), max(round(num_bytes / per_call), num_bytes > 0))


def _make_finding(context: Context, loops: list[_KeptByLoop]) -> Finding:
    trace = context.ledger.trace
    loop, holders, keys, _ = max(loops, key=lambda one: context.lifetimes.sum_bytes(one.storages))
    alike = [one for one in loops if one.keys == keys]
    kept_storages = set[int]().union(*(one.storages for one in alike))
    left_bytes, _, live = context.lifetimes.find_max_live(kept_storages)
    name = trace.modules[loop[0].module].class_name
    outputs = {index for forward in loop for index in forward.outputs}
    has_caches = any(context.ledger.categories[index] is Category.KV_CACHE for index in kept_storages)
    is_inside = not has_caches and any(trace.storages[index].module != NONE for index in kept_storages - outputs)
    per_call = sum(map(_sum_bytes_per_call, holders.values()))
    moved = {index for index in kept_storages if trace.op(trace.storages[index]) == _MOVING}
    # A metric keeps what it makes of the outputs.
    is_of_object = all(
        holder is not None and holder.kind and holder.kind not in growth.CONTAINERS for holder in holders
    )
    kept = "KV caches and outputs" if has_caches else "Tensors" if is_inside or is_of_object else "Outputs"
    if moved and kept == "Outputs":
        kept = "Inputs or targets" if moved == kept_storages else "Outputs, and inputs or targets,"
    num_calls = sum(_count_calls(context, one, live) for one in alike)
    calls, call = (f"{num_calls:,} batches", "batch") if is_of_object else (f"{num_calls:,} calls of {name}", "call")
    title = (
        f"{kept} of {calls} stay on the GPU: {format_bytes(per_call)} a {call}, {format_bytes(left_bytes)} in all"
        f"{growth.format_holders(*holders)}"
    )
    evidence = []
    for holder, leaks in holders.items():
        evidence += [growth.holder_evidence(holder), *growth.leak_evidence(trace, leaks, "call")]
    batches = next((holder.batches for holder in holders if holder is not None and holder.batches is not None), None)
    if batches is not None:
        total_bytes = batches * per_call
        text = f"the data loader has {batches:,} batches: {format_bytes(total_bytes)} over all of it"
        evidence.append(Evidence(text, num_bytes=total_bytes))
    exhaustion = growth.exhaustion_evidence(context, per_call, "call")
    if exhaustion is not None:
        evidence.append(exhaustion)
    needs = _compute_needs(context, kept_storages, max(one.loop[-1].end for one in alike))
    if needs is not None:
        evidence.append(effect_evidence(context, needs, name_other_place(context)))
    evidence += dict.fromkeys(_make_fix_evidence(context, holder, leaks) for holder, leaks in holders.items())
    if is_inside and loop[-1].training:
        source = trace.source_at(loop[-1].source)
        text = (
            f"fix: {name} is in training mode, in which hooks may keep more: call eval() before {file_and_line(source)}"
        )
        evidence.append(Evidence(text, source=source))
    severity = Severity.WARNING if per_call >= WARNING_BYTES else Severity.NOTE
    seen = [holder for holder in holders if holder is not None]
    largest = max(holders, key=lambda holder: _sum_bytes_per_call(holders[holder]))
    edit = make_holder_edit(trace, largest, EditKind.KEEP_OUTPUTS_ON_HOST) if has_host_memory(context) else None
    return Finding(
        "evaluation-accumulates",
        severity,
        title,
        left_bytes,
        tuple(evidence),
        (),
        is_decisive=is_decisive(context, needs),
        edit=edit,
        culprit=None if largest is None else Culprit(growth.name_holders(seen), frozenset(kept_storages)),
    )


def _compute_needs(context: Context, kept: set[int], end: int) -> MemoryNeeds | None:
    """Return what a run that does not fit needs with `kept` in host memory, and with what is made of them: the failed
    allocation if the same line makes that, and, if no model is called after the event `end` of the last call, what is
    made from there on and no larger than they are together, as when they are joined. None for others."""
    trace, oom = context.ledger.trace, context.ledger.out_of_memory
    if oom is None:
        return None
    made = {(trace.storages[index].source, trace.storages[index].op) for index in kept}
    failed = trace.storages[oom.storage]
    away = kept | {oom.storage} if (failed.source, failed.op) in made else set(kept)
    if trace.ended_out_of_memory and all(call.begin < end for call in trace.list_calls()):
        kept_bytes = sum(trace.storages[index].num_bytes for index in kept)
        later = {*new_storages(context, end, len(trace.events)), oom.storage}
        away.update(index for index in later if trace.storages[index].num_bytes <= kept_bytes)
    return compute_needs_of(context, resize(trace, dict.fromkeys(away, 0)))


def _make_fix_evidence(context: Context, holder: Holder | None, leaks: list[growth.LeakGroup]) -> Evidence:
    """Return the change of what `holder` keeps."""
    trace = context.ledger.trace
    lines = [None if holder is None else holder.source]
    lines += [trace.source_line(trace.storages[leak.storages[-1]]) for leak in leaks]
    if any(line is not None and TRAINER in line.replace("\\", "/") for line in lines):
        return Evidence(
            "fix: give the Trainer preprocess_logits_for_metrics, to keep of the logits what compute_metrics needs (as "
            "their argmax or top k, not taken again there), or set eval_accumulation_steps, which moves the outputs to "
            "host memory after every so many batches"
        )
    if any(context.ledger.categories[leak.storages[-1]] is Category.KV_CACHE for leak in leaks):
        return growth.holder_fix_evidence(
            holder, "drop the KV cache of each call when its request is over, and keep its tokens"
        )
    if (view := growth.describe_view(trace, holder)) is not None:
        return growth.holder_fix_evidence(holder, f"keep .clone() or .cpu() of it: {view}")
    if all(trace.op(trace.storages[leak.storages[-1]]) == _MOVING for leak in leaks):
        return growth.holder_fix_evidence(holder, "keep it in host memory: .cpu(), or what it was before it was moved")
    on_host = " in host memory (.cpu())" if has_host_memory(context) else ""
    made_at = trace.find_own_line(max(leaks, key=lambda leak: leak.bytes_each).storages[-1]) if holder else None
    fix = f"keep of each batch only what is needed of it later,{on_host}".removesuffix(",")
    if on_host and made_at is not None and holder is not None and not holder.fills:  # as what a metric is given
        fix = "move this to host memory (.cpu()): it is kept of each batch"
    return growth.holder_fix_evidence(holder, fix, made_at)
