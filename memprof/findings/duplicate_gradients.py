"""Rule `gradients-twice`: gradients exist both in `.grad` and in the buckets of DistributedDataParallel."""

from __future__ import annotations

from memprof.findings.evidence import names_of, tensors_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import comm_buffers, ddp_groups, fix_at, gain_text, group_line, is_large, name_filter
from memprof.trace.events import Role
from memprof.units import format_bytes

MAX_SHOWN = 3  # groups of equal gradients in the evidence


@rule(86)
def find(context: Context) -> list[Finding]:
    """Return one finding per DDP wrapper; `num_bytes` is the reduction of the peak if gradients are bucket views."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    buckets = comm_buffers(trace, "gradient bucket")
    findings = []
    for group in ddp_groups(context):
        is_in_group = name_filter(group)
        gradients = [index for index, name in names_of(trace, Role.GRADIENT).items() if is_in_group(name)]
        saved_bytes = 0 if group.views or not buckets else lifetimes.peak_reduction(lifetimes.savings(gradients))
        if not is_large(context, saved_bytes):
            continue
        max_live = lifetimes.find_max_live(gradients)
        bucket_bytes = lifetimes.find_live(max_live.event, buckets).num_bytes
        title = (
            f"Gradients exist twice: {format_bytes(max_live.num_bytes)} in `.grad` beside {format_bytes(bucket_bytes)} "
            f"in the buckets of DistributedDataParallel; as views of these {gain_text(context, saved_bytes)}"
        )
        line = group_line(trace, group)
        lines = (
            fix_at(line, "pass gradient_as_bucket_view=True to DistributedDataParallel"),
            *tensors_evidence(context, buckets, max_live.event, lambda index: "bucket")[:MAX_SHOWN],
            *tensors_evidence(context, gradients, max_live.event, lambda index: "gradient")[:MAX_SHOWN],
        )
        findings.append(Finding("gradients-twice", Severity.WARNING, title, saved_bytes, lines, ()))
    return findings
