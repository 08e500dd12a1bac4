"""Rule `prefetch-too-deep`: sharded parameters are all-gathered earlier than one group ahead."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict

from memprof.allocator import TraceReplay
from memprof.allocator.streams import Completion
from memprof.findings.evidence import percent, plural, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import (
    comm_buffers,
    fix_at,
    fsdp_groups,
    gain_text,
    gathers,
    group_line,
    is_large,
    strip_wrappers,
)
from memprof.trace.events import EventKind, Role
from memprof.units import format_bytes

AHEAD = 1  # groups gathered ahead that suffice to overlap communication with computation
_LAYER = re.compile(r"((?:\D+\.)?\d+)\.")


@rule(91)
def find(context: Context) -> list[Finding]:
    """Return the findings; `num_bytes` is the reduction of the peak if only one group is gathered ahead."""
    return _find_explicit_prefetch(context) + _find_unlimited_gathers(context) + _find_manual_gathering(context)


def _find_explicit_prefetch(context: Context) -> list[Finding]:
    """Return findings for fully_shard's `set_modules_to_forward_prefetch` (or backward) with several modules."""
    groups = [group for group in fsdp_groups(context) if group.ahead > AHEAD]
    trace, lifetimes = context.ledger.trace, context.lifetimes
    buffers = comm_buffers(trace, "all-gather")
    excess = lifetimes.savings_beyond([[index] for index in buffers], AHEAD + 1, oldest=True) if groups else []
    saved = lifetimes.peak_reduction(excess) if groups else 0
    if not is_large(context, saved):
        return []
    max_ahead = max(group.ahead for group in groups)
    title = f"{plural(max_ahead, 'group')} are gathered ahead of their turn: with one {gain_text(context, saved)}"
    fix = "give set_modules_to_forward_prefetch and set_modules_to_backward_prefetch one module each"
    lines = (
        fix_at(group_line(trace, groups[0]), fix),
        *tensors_evidence(context, buffers, lifetimes.find_max_live(buffers).event, lambda i: "all-gather")[:3],
    )
    return [Finding("prefetch-too-deep", Severity.WARNING, title, saved, lines, ())]


def _find_unlimited_gathers(context: Context) -> list[Finding]:
    """Return findings for FSDP's `limit_all_gathers=False`: any number of groups may be gathered ahead."""
    groups = [group for group in fsdp_groups(context) if group.unlimited]
    run = context.ledger.run
    if not groups or run.bounds is None:
        return []
    at_once_bytes = _replay_without_waits(context, {index for indices in gathers(context, groups) for index in indices})
    excess = run.bounds.upper_bound_bytes - at_once_bytes
    if not is_large(context, excess):
        return []
    title = (
        f"Nothing limits how many groups are gathered ahead (limit_all_gathers=False): where the GPU falls behind, "
        f"parameters take up to {format_bytes(excess)} more of what is reserved ({percent(excess, at_once_bytes)})"
    )
    lines = (
        fix_at(group_line(context.ledger.trace, groups[0]), "leave limit_all_gathers as it is, True"),
        Evidence(
            f"reserved if what was gathered is free at once: {format_bytes(at_once_bytes)}; only once the host has "
            f"waited: {format_bytes(run.bounds.upper_bound_bytes)}",
            num_bytes=run.bounds.upper_bound_bytes,
        ),
    )
    return [Finding("prefetch-too-deep", Severity.WARNING, title, excess, lines, ())]


def _replay_without_waits(context: Context, gathered: set[int]) -> int:
    """Return the peak of reserved bytes if freed storages in `gathered` can be reused at once, others after a sync."""
    run = context.ledger.run
    trace = run.trace
    events = [e for e in trace.events if not (e.kind is EventKind.USE and trace.uses[e.ref].storage in gathered)]
    changed_trace = dataclasses.replace(trace, events=events)
    replay = TraceReplay(changed_trace, None, run.config, run.release, Completion.AT_SYNC, counts=False)
    replay.advance(writes=False)
    return replay.allocator.counters.reserved_bytes_peak


def _find_manual_gathering(context: Context) -> list[Finding]:
    """Return findings for programs that gather parameters without FSDP, with over two layers unsharded at once."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    if trace.facts.groups:
        return []
    storages_by_layer: dict[tuple[str, int], list[int]] = defaultdict(list)
    num_seen: Counter[str] = Counter()
    for index, owner in trace.owners.items():
        if owner.role is Role.UNSHARDED and trace.storages[index].device == trace.device:
            layer = _LAYER.match(strip_wrappers(owner.name))
            num_seen[owner.name] += 1
            storages_by_layer[layer[1] if layer else owner.name, num_seen[owner.name]].append(index)
    saved_bytes = lifetimes.peak_reduction(lifetimes.savings_beyond(storages_by_layer.values(), AHEAD + 1))
    if not is_large(context, saved_bytes):
        return []
    max_live = lifetimes.find_max_live(index for indices in storages_by_layer.values() for index in indices)
    num_layers = sum(any(index in max_live.storages for index in indices) for indices in storages_by_layer.values())
    largest = max(max_live.storages, key=lambda index: trace.storages[index].num_bytes)
    title = (
        f"Parameters of {num_layers} layers are whole at once, {format_bytes(max_live.num_bytes)}: with one gathered "
        f"ahead {gain_text(context, saved_bytes)}"
    )
    fix = "gather a layer when the one before it begins, and give each back once it is done"
    lines = (
        fix_at(trace.source_line(trace.storages[largest]), fix),
        *tensors_evidence(context, max_live.storages, max_live.event, lambda index: "gathered")[:3],
    )
    return [Finding("prefetch-too-deep", Severity.WARNING, title, saved_bytes, lines, ())]
