"""Rule `optimizer-state-not-sharded`: each DDP rank keeps the full optimizer state, which ZeRO-1 would shard."""

from __future__ import annotations

import math

from memprof.findings.evidence import names_of, plural, tensors_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.findings.groups import ddp_groups, fix_at, gain_text, is_large
from memprof.trace.events import Role
from memprof.trace.facts import ShardedGroup
from memprof.units import format_bytes

MIN_FULL_STATE_SHARE = 0.9  # state is not sharded if it has this many elements per element of the parameters

MIN_SHARE = 0.05  # of the peak, required as its reduction: more than in other rules, since this fix is more work

MAX_SHOWN = 3


@rule(87)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak on the rank with the largest shard."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    groups = ddp_groups(context)
    names = names_of(trace, Role.OPTIMIZER_STATE)
    state = [index for index in names if trace.storages[index].device == trace.device]
    if not groups or not state:
        return []
    group = max(groups, key=_count_elements)
    num_elements = sum(math.prod(trace.storages[index].shape) for index in lifetimes.find_max_live(state).storages)
    if num_elements < MIN_FULL_STATE_SHARE * sum(map(_count_elements, groups)):
        return []
    shard_elements = _compute_largest_shard([math.prod(shape) for shape in group.shapes], group.ranks)
    saved_share = 1 - shard_elements / _count_elements(group)
    saved_bytes = lifetimes.peak_reduction(lifetimes.savings(state, saved_share))
    if not is_large(context, saved_bytes) or saved_bytes < MIN_SHARE * context.ledger.peak_bytes:
        return []
    max_live = lifetimes.find_max_live(state)
    title = (
        f"Optimizer state is whole on each of {plural(group.ranks, 'rank')}: {format_bytes(max_live.num_bytes)}; "
        f"sharded (ZeRO-1), a rank keeps at most {format_bytes(int(max_live.num_bytes * (1 - saved_share)))}, and "
        f"{gain_text(context, saved_bytes)}"
    )
    line = trace.source_line(trace.storages[max(max_live.storages, key=lambda index: trace.storages[index].num_bytes)])
    lines = (
        fix_at(line, "step a ZeroRedundancyOptimizer(model.parameters(), optimizer_class=...), or use fully_shard"),
        *tensors_evidence(context, state, max_live.event, names.__getitem__)[:MAX_SHOWN],
    )
    return [Finding("optimizer-state-not-sharded", Severity.NOTE, title, saved_bytes, lines, ())]


def _count_elements(group: ShardedGroup) -> int:
    return sum(map(math.prod, group.shapes))


def _compute_largest_shard(num_elements: list[int], num_ranks: int) -> int:
    """Return the elements of the largest shard if each parameter, largest first, goes to the rank with the fewest
    elements (ZeroRedundancyOptimizer._partition_parameters); `num_elements` has the size of each parameter."""
    shard_sizes = [0] * num_ranks
    for size in sorted(num_elements, reverse=True):
        shard_sizes[shard_sizes.index(min(shard_sizes))] += size
    return max(shard_sizes)
