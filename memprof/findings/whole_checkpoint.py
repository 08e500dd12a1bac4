"""Rule `whole-checkpoint`: one checkpoint around most layers of a model, all of which its backward then has at once."""

from __future__ import annotations

from collections import Counter

from memprof.findings.effect import compute_needs_of, effect_evidence, is_decisive
from memprof.findings.evidence import file_and_line, percent
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.proposals.checkpointing import LayerCall, checkpoint_calls, list_recomputed_calls
from memprof.ledger.what_if import compute_allocated_peak
from memprof.trace.events import EventKind, Trace
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.05  # of the peak: found if the peak would be lower by at least this and MIN_BYTES

MIN_LAYERS = 3  # in one checkpoint, and more than half of the list: a few segments of a long list are what is meant


@rule(74)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak with a checkpoint for each layer."""
    ledger, trace = context.ledger, context.ledger.trace
    groups = [group for group in _group_by_backward(list_recomputed_calls(trace)) if _has_most(trace, group)]
    changed = checkpoint_calls(context, [call for group in groups for call in group])
    if changed is None:
        return []
    num_bytes = ledger.peak_bytes - compute_allocated_peak(changed)
    if num_bytes < MIN_BYTES or num_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    needs = compute_needs_of(context, changed)
    decides = is_decisive(context, needs)
    largest = max(groups, key=len)
    stack = trace.modules[largest[0].module].stack
    source = _find_line(trace, largest)
    title = (
        f"One checkpoint at {file_and_line(source)} has {len(largest)} layers ({stack}): its backward computes the "
        f"activations of all of them at once; with a checkpoint for each layer the peak is "
        f"{percent(num_bytes, ledger.peak_bytes)} ({format_bytes(num_bytes)}) lower"
    )
    fix = "fix: call checkpoint for each layer, or checkpoint_sequential(layers, number of layers, x)"
    evidence = (Evidence(fix, source=source), effect_evidence(context, needs, "with a checkpoint for each layer"))
    return [Finding("whole-checkpoint", Severity.WARNING, title, num_bytes, evidence, (), is_decisive=decides)]


def _group_by_backward(calls: list[LayerCall]) -> list[list[LayerCall]]:
    """Return the calls of each checkpoint: a layer belongs to that of the one before if it runs before its backward."""
    groups: list[list[LayerCall]] = []
    for call in calls:
        if groups and call.begin < groups[-1][-1].backward:
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _has_most(trace: Trace, group: list[LayerCall]) -> bool:
    """Return whether a checkpoint has several layers, which are more than half of their list."""
    stack, num_layers = Counter(trace.modules[call.module].stack for call in group).most_common(1)[0]
    all_layers = sum(module.stack == stack and module.stack != "" for module in trace.modules)
    return num_layers >= MIN_LAYERS and 2 * num_layers > all_layers


def _find_line(trace: Trace, group: list[LayerCall]) -> str | None:
    """Return the line that calls the checkpoint; None if no large tensor of it was recorded."""
    callers = {line.source: line.caller for line in trace.checkpointed_lines}
    modules = {call.module for call in group}
    for kind, ref in trace.events[: group[0].begin]:
        if kind is EventKind.ALLOC and trace.storages[ref].module in modules and trace.storages[ref].source in callers:
            return trace.source_at(callers[trace.storages[ref].source])
    return None
