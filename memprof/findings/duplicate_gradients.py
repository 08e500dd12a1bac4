"""Gradients that exist in addition to DistributedDataParallel's buckets."""

from __future__ import annotations

from memprof.findings.evidence import owned, tensors_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import communicated, ddp_groups, fix_at, is_worth, line_of, lower_peak, parameter_filter
from memprof.trace.events import Role
from memprof.units import format_bytes

MOST_SHOWN = 3  # kinds of gradients in the evidence


@rule(86)
def find(context: Context) -> list[Finding]:
    """Return a finding for each wrapper; `num_bytes` is the reduction of the peak without the gradients."""
    trace, lives = context.ledger.trace, context.lives
    buckets = communicated(trace, "gradient bucket")
    findings = []
    for group in ddp_groups(context):
        is_own = parameter_filter(group)
        gradients = [index for index, name in owned(trace, Role.GRADIENT).items() if is_own(name)]
        saved = 0 if group.views or not buckets else lives.peak_reduction(lives.savings(gradients))
        if not is_worth(context, saved):
            continue
        most = lives.most(gradients)
        in_buckets = lives.at(most.event, buckets).num_bytes
        title = (
            f"Gradients exist twice: {format_bytes(most.num_bytes)} in `.grad` beside {format_bytes(in_buckets)} in "
            f"the buckets of DistributedDataParallel; as views of these {lower_peak(context, saved)}"
        )
        line = line_of(trace, group)
        lines = (
            fix_at(line, "DistributedDataParallel(..., gradient_as_bucket_view=True)"),
            *tensors_evidence(context, buckets, most.event, lambda index: "bucket")[:MOST_SHOWN],
            *tensors_evidence(context, gradients, most.event, lambda index: "gradient")[:MOST_SHOWN],
        )
        findings.append(Finding("gradients-twice", Severity.WARNING, title, saved, lines, ()))
    return findings
