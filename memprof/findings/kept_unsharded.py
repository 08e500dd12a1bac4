"""Parameters that stay unsharded between forward and backward, because of the program's settings."""

from __future__ import annotations

from memprof.findings.evidence import plural
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, fix_at, fsdp_groups, gathered, is_worth, line_of, lower_peak, whole_bytes
from memprof.units import format_bytes

AT_ONCE = 2  # groups that are whole at once without it: the one that computes, and the next


@rule(89)
def find(context: Context) -> list[Finding]:
    """Return a finding for unsharded groups; `num_bytes` is the reduction of the peak if forwards reshard them."""
    groups = [group for group in fsdp_groups(context) if group.kept]
    saved = context.lives.peak_reduction(context.lives.savings_beyond(gathered(context, groups), AT_ONCE))
    if len(groups) <= AT_ONCE or not is_worth(context, saved):
        return []
    own = groups[0].api == FSDP2
    said = "reshard_after_forward=False" if own else "ShardingStrategy.SHARD_GRAD_OP"
    traffic = sum(num_bytes for group in groups for num_bytes in whole_bytes(group).values())
    title = (
        f"{plural(len(groups), 'group')} of parameters stay whole from the forward to the backward ({said}): sharded "
        f"in between, {lower_peak(context, saved)}"
    )
    do = "reshard_after_forward=True" if own else "ShardingStrategy.FULL_SHARD"
    lines = (
        fix_at(line_of(context.ledger.trace, groups[0]), do),
        Evidence(f"it costs a second all-gather in each step: {format_bytes(traffic)} more to receive", traffic),
    )
    return [Finding("kept-unsharded", Severity.NOTE, title, saved, lines, ())]
