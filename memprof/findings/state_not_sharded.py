"""Optimizer state that each rank of DistributedDataParallel keeps whole, though it could be sharded (ZeRO-1)."""

from __future__ import annotations

import math

from memprof.findings.evidence import get_names, plural, tensors_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import get_ddp_groups, make_fix_evidence, is_worth_reporting, format_peak_reduction
from memprof.trace.events import Role
from memprof.trace.facts import ShardedGroup
from memprof.units import format_bytes

WHOLE_SHARE = 0.9  # state is whole if it has at least so many elements for each parameter's

MIN_SHARE = 0.05  # of the peak, which would be lower by as much: this edit is larger than those of other findings

MAX_SHOWN = 3


@rule(87)
def find(context: Context) -> list[Finding]:
    """Return findings for whole states; `num_bytes` is the reduction of the peak on the rank with the largest shard."""
    trace, lives = context.ledger.trace, context.lives
    groups = get_ddp_groups(context)
    names = get_names(trace, Role.OPTIMIZER_STATE)
    state = [index for index in names if trace.storages[index].device == trace.device]
    if not groups or not state:
        return []
    group = max(groups, key=_count_elements)
    kept = sum(math.prod(trace.storages[index].shape) for index in lives.find_max_live(state).storages)
    if kept < WHOLE_SHARE * sum(map(_count_elements, groups)):
        return []
    part = _compute_largest_shard([math.prod(shape) for shape in group.shapes], group.ranks)
    share = 1 - part / _count_elements(group)
    saved = lives.peak_reduction(lives.savings(state, share))
    if not is_worth_reporting(context, saved) or saved < MIN_SHARE * context.ledger.peak_bytes:
        return []
    most = lives.find_max_live(state)
    title = (
        f"Optimizer state is whole on each of {plural(group.ranks, 'rank')}: {format_bytes(most.num_bytes)}; sharded "
        f"(ZeRO-1), a rank keeps at most {format_bytes(int(most.num_bytes * (1 - share)))}, and "
        f"{format_peak_reduction(context, saved)}"
    )
    line = trace.source_line(trace.storages[max(most.storages, key=lambda index: trace.storages[index].num_bytes)])
    lines = (
        make_fix_evidence(line, "step a ZeroRedundancyOptimizer(model.parameters(), optimizer_class=...), or use fully_shard"),
        *tensors_evidence(context, state, most.event, names.__getitem__)[:MAX_SHOWN],
    )
    return [Finding("optimizer-state-not-sharded", Severity.NOTE, title, saved, lines, ())]


def _count_elements(group: ShardedGroup) -> int:
    return sum(map(math.prod, group.shapes))


def _compute_largest_shard(sizes: list[int], ranks: int) -> int:
    """Return the elements of the largest shard: each parameter, in order of size, goes to the rank with the fewest
    elements (ZeroRedundancyOptimizer._partition_parameters)."""
    parts = [0] * ranks
    for size in sorted(sizes, reverse=True):
        parts[parts.index(min(parts))] += size
    return max(parts)
