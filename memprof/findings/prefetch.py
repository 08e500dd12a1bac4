"""Parameters that are gathered further ahead than the next group."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict

from memprof.allocator import TraceReplay
from memprof.allocator.streams import Completion
from memprof.findings.evidence import percent, plural, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import (
    find_comm_buffers,
    make_fix_evidence,
    get_fsdp_groups,
    find_gathers,
    is_worth_reporting,
    find_group_line,
    format_peak_reduction,
    strip_wrappers,
)
from memprof.trace.events import EventKind, Role
from memprof.units import format_bytes

AHEAD = 1  # groups that are enough for a collective to run while a group computes
_LAYER = re.compile(r"((?:\D+\.)?\d+)\.")


@rule(91)
def find(context: Context) -> list[Finding]:
    """Return findings for prefetching; `num_bytes` is the reduction of the peak with one group gathered ahead."""
    return _find_explicit_prefetch(context) + _find_unlimited_gathers(context) + _find_manual_gathering(context)


def _find_explicit_prefetch(context: Context) -> list[Finding]:
    """Return findings for `set_modules_to_forward_prefetch` or `..._backward_prefetch` with several modules."""
    groups = [group for group in get_fsdp_groups(context) if group.ahead > AHEAD]
    trace, lives = context.ledger.trace, context.lives
    sent = find_comm_buffers(trace, "all-gather")
    saved = lives.peak_reduction(lives.savings_beyond([[one] for one in sent], AHEAD + 1, oldest=True)) if groups else 0
    if not is_worth_reporting(context, saved):
        return []
    most = max(group.ahead for group in groups)
    title = f"{plural(most, 'group')} are gathered ahead of their turn: with one {format_peak_reduction(context, saved)}"
    do = "give set_modules_to_forward_prefetch and set_modules_to_backward_prefetch one module each"
    lines = (
        make_fix_evidence(find_group_line(trace, groups[0]), do),
        *tensors_evidence(context, sent, lives.find_max_live(sent).event, lambda index: "all-gather")[:3],
    )
    return [Finding("prefetch-too-deep", Severity.WARNING, title, saved, lines, ())]


def _find_unlimited_gathers(context: Context) -> list[Finding]:
    """Return findings for `limit_all_gathers=False`: parameters are gathered while freed ones wait for the GPU."""
    groups = [group for group in get_fsdp_groups(context) if group.unlimited]
    run = context.ledger.run
    if not groups or run.bounds is None:
        return []
    at_once = _replay_without_waits(context, {one for own in find_gathers(context, groups) for one in own})
    more = run.bounds.upper_bound_bytes - at_once
    if not is_worth_reporting(context, more):
        return []
    title = (
        f"Nothing limits how many groups are gathered ahead (limit_all_gathers=False): where the GPU falls behind, "
        f"parameters take up to {format_bytes(more)} more of what is reserved ({percent(more, at_once)})"
    )
    lines = (
        make_fix_evidence(find_group_line(context.ledger.trace, groups[0]), "leave limit_all_gathers as it is, True"),
        Evidence(
            f"reserved if what was gathered is free at once: {format_bytes(at_once)}; only once the host has waited: "
            f"{format_bytes(run.bounds.upper_bound_bytes)}",
            num_bytes=run.bounds.upper_bound_bytes,
        ),
    )
    return [Finding("prefetch-too-deep", Severity.WARNING, title, more, lines, ())]


def _replay_without_waits(context: Context, lent: set[int]) -> int:
    """Return the maximum reserved bytes if blocks in `lent` are free at once, and others on streams after a wait."""
    run = context.ledger.run
    trace = run.trace
    events = [
        event for event in trace.events if not (event.kind is EventKind.USE and trace.uses[event.ref].storage in lent)
    ]
    changed = dataclasses.replace(trace, events=events)
    replay = TraceReplay(changed, None, run.config, run.release, Completion.AT_SYNC, counts=False)
    replay.advance(writes=False)
    return replay.allocator.counters.reserved_bytes_peak


def _find_manual_gathering(context: Context) -> list[Finding]:
    """Return findings for programs that gather parameters themselves, with more than two layers whole at once."""
    trace, lives = context.ledger.trace, context.lives
    if trace.facts.groups:
        return []
    layers: dict[tuple[str, int], list[int]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for index, owner in trace.owners.items():
        if owner.role is Role.UNSHARDED and trace.storages[index].device == trace.device:
            layer = _LAYER.match(strip_wrappers(owner.name))
            seen[owner.name] += 1
            layers[layer[1] if layer else owner.name, seen[owner.name]].append(index)
    saved = lives.peak_reduction(lives.savings_beyond(layers.values(), AHEAD + 1))
    if not is_worth_reporting(context, saved):
        return []
    whole = lives.find_max_live(index for own in layers.values() for index in own)
    at_once = sum(any(index in whole.storages for index in own) for own in layers.values())
    first = max(whole.storages, key=lambda index: trace.storages[index].num_bytes)
    title = (
        f"Parameters of {at_once} layers are whole at once, {format_bytes(whole.num_bytes)}: with one gathered ahead "
        f"{format_peak_reduction(context, saved)}"
    )
    do = "gather a layer when the one before it begins, and give each back once it is done"
    lines = (
        make_fix_evidence(trace.source_line(trace.storages[first]), do),
        *tensors_evidence(context, whole.storages, whole.event, lambda index: "gathered")[:3],
    )
    return [Finding("prefetch-too-deep", Severity.WARNING, title, saved, lines, ())]
