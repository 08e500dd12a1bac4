"""Rule `float32-reduction`: half-precision gradients are copied to float32 for their reduction over the ranks."""

from __future__ import annotations

from memprof.findings.evidence import HALF_DTYPES, find_half, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, comm_buffers, fix_at, fsdp_groups, gain_text, group_line, is_large
from memprof.units import format_bytes


@rule(92)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak with a reduction in half precision."""
    groups = [group for group in fsdp_groups(context) if group.dtype in HALF_DTYPES]
    trace, lifetimes = context.ledger.trace, context.lifetimes
    half_dtype = groups[0].dtype if groups else find_half(context)
    buffers = [index for index in comm_buffers(trace, "reduce-scatter") if trace.storages[index].dtype == "float32"]
    if half_dtype is None or not buffers:
        return []
    # FSDP needs a half-precision buffer in place of the float32 copy; the program's own copy is not needed at all.
    saved_bytes = lifetimes.peak_reduction(lifetimes.savings(buffers, 0.5 if groups else 1.0))
    if not is_large(context, saved_bytes):
        return []
    title = (
        f"{half_dtype} gradients are reduced in float32: {format_bytes(lifetimes.find_max_live(buffers).num_bytes)} of "
        f"copies live at once; in {half_dtype} {gain_text(context, saved_bytes)}"
    )
    if groups:
        policy = "MixedPrecisionPolicy" if groups[0].api == FSDP2 else "MixedPrecision"
        fix = fix_at(group_line(trace, groups[0]), f"{policy}(reduce_dtype=torch.{half_dtype})")
    else:
        fix = fix_at(trace.source_line(trace.storages[buffers[0]]), f"reduce the {half_dtype} gradients themselves")
    lines = (
        fix,
        Evidence(f"sums over the ranks are then rounded to {half_dtype}: training may suffer"),
        *tensors_evidence(context, buffers, lifetimes.find_max_live(buffers).event, lambda index: "float32 copy")[:3],
    )
    return [Finding("float32-reduction", Severity.NOTE, title, saved_bytes, lines, ())]
