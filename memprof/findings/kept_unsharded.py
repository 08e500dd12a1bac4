"""Rule `kept-unsharded`: settings of FSDP keep parameters unsharded between forward and backward."""

from __future__ import annotations

from memprof.findings.evidence import plural
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import FSDP2, fix_at, fsdp_groups, full_bytes, gain_text, gathers, group_line, is_large
from memprof.units import format_bytes

MAX_FULL = 2  # groups that are unsharded at once with resharding: the one that computes, and the next


@rule(89)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak if groups are resharded after forward."""
    groups = [group for group in fsdp_groups(context) if group.kept]
    saved_bytes = context.lifetimes.peak_reduction(context.lifetimes.savings_beyond(gathers(context, groups), MAX_FULL))
    if len(groups) <= MAX_FULL or not is_large(context, saved_bytes):
        return []
    is_fsdp2 = groups[0].api == FSDP2
    setting = "reshard_after_forward=False" if is_fsdp2 else "ShardingStrategy.SHARD_GRAD_OP"
    traffic = sum(num_bytes for group in groups for num_bytes in full_bytes(group).values())
    title = (
        f"{plural(len(groups), 'group')} of parameters stay whole from the forward to the backward ({setting}): "
        f"sharded in between, {gain_text(context, saved_bytes)}"
    )
    fix = "reshard_after_forward=True" if is_fsdp2 else "ShardingStrategy.FULL_SHARD"
    lines = (
        fix_at(group_line(context.ledger.trace, groups[0]), fix),
        Evidence(f"it costs a second all-gather in each step: {format_bytes(traffic)} more to receive", traffic),
    )
    return [Finding("kept-unsharded", Severity.NOTE, title, saved_bytes, lines, ())]
