"""Whole gradients of sharded parameters, kept from one micro-batch to the next."""

from __future__ import annotations

import math

from memprof.findings.evidence import get_names, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, make_fix_evidence, get_fsdp_groups, is_worth_reporting, find_group_line, format_peak_reduction, make_name_filter
from memprof.trace.events import PhaseKind, Role
from memprof.units import format_bytes


@rule(93)
def find(context: Context) -> list[Finding]:
    """Return a finding for whole gradients; `num_bytes` is the reduction of the peak if micro-batches reduce them."""
    trace, lives = context.ledger.trace, context.lives
    groups = get_fsdp_groups(context)
    ends = [time for time, phase in trace.list_phase_begins() if phase.kind is PhaseKind.FORWARD]
    found, least = [], 1.0
    for group in groups:
        is_own = make_name_filter(group)
        whole = {math.prod(shape) for shape in group.shapes} | {sum(map(math.prod, group.shapes))}
        own = [
            index
            for index, name in get_names(trace, Role.GRADIENT).items()
            if is_own(name)
            and math.prod(trace.storages[index].shape) in whole
            and any(lives.births[index] < time < lives.deaths[index] for time in ends)
        ]
        found += own
        least = min(least, 1 - 1 / group.ranks) if own else least
    saved = lives.peak_reduction(lives.savings(found, least))
    if not is_worth_reporting(context, saved):
        return []
    most = lives.find_max_live(found)
    title = (
        f"Gradients of sharded parameters wait, whole, for the last micro-batch: {format_bytes(most.num_bytes)}; "
        f"reduced in each, {format_peak_reduction(context, saved)}"
    )
    said = "set_requires_gradient_sync(False)" if groups[0].api == FSDP2 else "no_sync()"
    lines = (
        make_fix_evidence(find_group_line(trace, groups[0]), f"accumulate without {said}"),
        Evidence("it costs a reduce-scatter of all gradients in each micro-batch"),
        *tensors_evidence(context, found, most.event, lambda index: "whole gradient")[:3],
    )
    return [Finding("unreduced-gradients", Severity.WARNING, title, saved, lines, ())]
