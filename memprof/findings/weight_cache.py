"""Rule `weight-cache`: autocast keeps half-precision copies of weights from call to call, until its block ends."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, plural, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import fix_at, gain_text, is_large
from memprof.trace.events import AUTOCAST_KIND
from memprof.units import format_bytes

MIN_CALLS = 2  # in the block, without gradients: within one call the copies serve, and a backward needs them

_MOST_SHOWN = 3


@rule(125)
def find(context: Context) -> list[Finding]:
    """Return at most one finding, for the block whose copies raise the peak most.

    `num_bytes` is by how much the peak would be lower with one copy at a time: without all but the largest.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    findings = []
    for holder in trace.idle_holders:
        copies = [index for index in holder.storages if trace.storages[index].device == trace.device]
        if holder.kind != AUTOCAST_KIND or not copies:
            continue
        begin = min(lifetimes.births[index] for index in copies)
        calls = [forward for forward in trace.forwards if forward.end > begin and forward.begin < holder.event]
        largest = max(copies, key=lambda index: trace.storages[index].num_bytes)
        saved = lifetimes.peak_reduction(lifetimes.savings(index for index in copies if index != largest))
        if len(calls) < MIN_CALLS or any(call.nodes for call in calls) or not is_large(context, saved):
            continue
        max_live = lifetimes.find_max_live(copies)
        title = (
            f"Autocast keeps {format_bytes(max_live.num_bytes)} of half-precision copies of weights through "
            f"{plural(len(calls), 'call')}, until its block at {file_and_line(holder.source)} ends; with one copy at a "
            f"time {gain_text(context, saved)}"
        )
        lines = (
            fix_at(holder.source, "torch.autocast(..., cache_enabled=False)"),
            Evidence(
                "it costs a copy of each weight in each call; without autocast, a model in half precision has one"
            ),
            *tensors_evidence(context, copies, max_live.event, lambda index: "copy")[:_MOST_SHOWN],
        )
        findings.append(Finding("weight-cache", Severity.WARNING, title, saved, lines, ()))
    return sorted(findings, key=lambda finding: -(finding.num_bytes or 0))[:1]
