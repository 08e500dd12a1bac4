"""Gradients that exist in addition to DistributedDataParallel's buckets."""

from __future__ import annotations

from memprof.findings.evidence import get_names, tensors_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import find_comm_buffers, get_ddp_groups, make_fix_evidence, is_worth_reporting, find_group_line, format_peak_reduction, make_name_filter
from memprof.trace.events import Role
from memprof.units import format_bytes

MAX_SHOWN = 3  # kinds of gradients in the evidence


@rule(86)
def find(context: Context) -> list[Finding]:
    """Return a finding for each wrapper; `num_bytes` is the reduction of the peak without the gradients."""
    trace, lives = context.ledger.trace, context.lives
    buckets = find_comm_buffers(trace, "gradient bucket")
    findings = []
    for group in get_ddp_groups(context):
        is_own = make_name_filter(group)
        gradients = [index for index, name in get_names(trace, Role.GRADIENT).items() if is_own(name)]
        saved = 0 if group.views or not buckets else lives.peak_reduction(lives.savings(gradients))
        if not is_worth_reporting(context, saved):
            continue
        most = lives.find_max_live(gradients)
        in_buckets = lives.find_live(most.event, buckets).num_bytes
        title = (
            f"Gradients exist twice: {format_bytes(most.num_bytes)} in `.grad` beside {format_bytes(in_buckets)} in "
            f"the buckets of DistributedDataParallel; as views of these {format_peak_reduction(context, saved)}"
        )
        line = find_group_line(trace, group)
        lines = (
            make_fix_evidence(line, "DistributedDataParallel(..., gradient_as_bucket_view=True)"),
            *tensors_evidence(context, buckets, most.event, lambda index: "bucket")[:MAX_SHOWN],
            *tensors_evidence(context, gradients, most.event, lambda index: "gradient")[:MAX_SHOWN],
        )
        findings.append(Finding("gradients-twice", Severity.WARNING, title, saved, lines, ()))
    return findings
