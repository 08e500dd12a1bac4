"""Rule `unreduced-gradients`: unsharded gradients of sharded parameters are kept from micro-batch to micro-batch."""

from __future__ import annotations

import math

from memprof.findings.evidence import names_of, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, fix_at, fsdp_groups, gain_text, group_line, is_large, name_filter
from memprof.trace.events import PhaseKind, Role
from memprof.units import format_bytes


@rule(93)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak if each micro-batch reduces gradients."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    groups = fsdp_groups(context)
    forward_begins = [event for event, phase in context.phases if phase.kind is PhaseKind.FORWARD]
    unreduced, min_saved_share = [], 1.0
    for group in groups:
        is_in_group = name_filter(group)
        full_sizes = {math.prod(shape) for shape in group.shapes} | {sum(map(math.prod, group.shapes))}
        in_group = [
            index
            for index, name in names_of(trace, Role.GRADIENT).items()
            if is_in_group(name)
            and math.prod(trace.storages[index].shape) in full_sizes
            and any(lifetimes.births[index] < event < lifetimes.deaths[index] for event in forward_begins)
        ]
        unreduced += in_group
        min_saved_share = min(min_saved_share, 1 - 1 / group.ranks) if in_group else min_saved_share
    saved_bytes = lifetimes.peak_reduction(lifetimes.savings(unreduced, min_saved_share))
    if not is_large(context, saved_bytes):
        return []
    max_live = lifetimes.find_max_live(unreduced)
    title = (
        f"Gradients of sharded parameters wait, whole, for the last micro-batch: {format_bytes(max_live.num_bytes)}; "
        f"reduced in each, {gain_text(context, saved_bytes)}"
    )
    setting = "set_requires_gradient_sync(False)" if groups[0].api == FSDP2 else "no_sync()"
    lines = (
        fix_at(group_line(trace, groups[0]), f"accumulate without {setting}"),
        Evidence("it costs a reduce-scatter of all gradients in each micro-batch"),
        *tensors_evidence(context, unreduced, max_live.event, lambda index: "whole gradient")[:3],
    )
    return [Finding("unreduced-gradients", Severity.WARNING, title, saved_bytes, lines, ())]
