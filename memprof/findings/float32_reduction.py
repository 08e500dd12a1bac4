"""Gradients in half precision that are copied to float32 for their reduction over the ranks."""

from __future__ import annotations

from memprof.findings.evidence import HALF_DTYPES, find_half_dtype, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, find_comm_buffers, make_fix_evidence, get_fsdp_groups, is_worth_reporting, find_group_line, format_peak_reduction
from memprof.units import format_bytes


@rule(92)
def find(context: Context) -> list[Finding]:
    """Return a finding for float32 copies; `num_bytes`: reduction of the peak at half size, or without own copies."""
    groups = [group for group in get_fsdp_groups(context) if group.dtype in HALF_DTYPES]
    trace, lives = context.ledger.trace, context.lives
    half = groups[0].dtype if groups else find_half_dtype(context)
    sent = [one for one in find_comm_buffers(trace, "reduce-scatter") if trace.storages[one].dtype == "float32"]
    if half is None or not sent:
        return []
    # A copy that the program makes itself can be left out.
    saved = lives.peak_reduction(lives.savings(sent, 0.5 if groups else 1.0))
    if not is_worth_reporting(context, saved):
        return []
    title = (
        f"{half} gradients are reduced in float32: {format_bytes(lives.find_max_live(sent).num_bytes)} of copies live at once; "
        f"in {half} {format_peak_reduction(context, saved)}"
    )
    if groups:
        policy = "MixedPrecisionPolicy" if groups[0].api == FSDP2 else "MixedPrecision"
        do = make_fix_evidence(find_group_line(trace, groups[0]), f"{policy}(reduce_dtype=torch.{half})")
    else:
        do = make_fix_evidence(trace.source_line(trace.storages[sent[0]]), f"reduce the {half} gradients themselves")
    lines = (
        do,
        Evidence(f"sums over the ranks are then rounded to {half}: training may suffer"),
        *tensors_evidence(context, sent, lives.find_max_live(sent).event, lambda index: "float32 copy")[:3],
    )
    return [Finding("float32-reduction", Severity.NOTE, title, saved, lines, ())]
