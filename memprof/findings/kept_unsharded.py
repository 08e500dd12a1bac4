"""Parameters that stay unsharded between forward and backward, because of the program's settings."""

from __future__ import annotations

from memprof.findings.evidence import plural
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, make_fix_evidence, get_fsdp_groups, find_gathers, is_worth_reporting, find_group_line, format_peak_reduction, get_unsharded_bytes
from memprof.units import format_bytes

AT_ONCE = 2  # groups that are whole at once without it: the one that computes, and the next


@rule(89)
def find(context: Context) -> list[Finding]:
    """Return a finding for unsharded groups; `num_bytes` is the reduction of the peak if forwards reshard them."""
    groups = [group for group in get_fsdp_groups(context) if group.kept]
    saved = context.lives.peak_reduction(context.lives.savings_beyond(find_gathers(context, groups), AT_ONCE))
    if len(groups) <= AT_ONCE or not is_worth_reporting(context, saved):
        return []
    own = groups[0].api == FSDP2
    said = "reshard_after_forward=False" if own else "ShardingStrategy.SHARD_GRAD_OP"
    traffic = sum(num_bytes for group in groups for num_bytes in get_unsharded_bytes(group).values())
    title = (
        f"{plural(len(groups), 'group')} of parameters stay whole from the forward to the backward ({said}): sharded "
        f"in between, {format_peak_reduction(context, saved)}"
    )
    do = "reshard_after_forward=True" if own else "ShardingStrategy.FULL_SHARD"
    lines = (
        make_fix_evidence(find_group_line(context.ledger.trace, groups[0]), do),
        Evidence(f"it costs a second all-gather in each step: {format_bytes(traffic)} more to receive", traffic),
    )
    return [Finding("kept-unsharded", Severity.NOTE, title, saved, lines, ())]
