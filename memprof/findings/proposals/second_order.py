"""Proposes gradients without a graph of their own, where many are taken and no backward has differentiated any."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from memprof.findings.evidence import file_and_line, plural
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import NONE, GraphBackward, PhaseKind

MIN_CALLS = 4  # of one line, one after another: fewer are terms of a loss, such as the derivatives of an equation


class GraphsInVain(NamedTuple):
    """Graphs of gradients that are not differentiated again."""

    frees: dict[int, int]  # storage -> event at which it is freed without them
    change: str
    source: str | None  # the line that takes the gradients


@proposes(42)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change of the line that takes the most gradients before the peak: what only these gradients' graphs
    keep is freed when each is there."""
    found, trace = find_graphs_in_vain(context), context.ledger.trace
    if found is not None:
        before_end = {index: time for index, time in found.frees.items() if time < len(trace.events)}
        yield Proposal(free_earlier(trace, before_end), found.change, source=found.source)


@cache_per_context
def find_graphs_in_vain(context: Context) -> GraphsInVain | None:
    """Return the graphs of the line that takes the most gradients before the peak; None if those are few."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    calls = _list_calls_until_peak(context)
    if len(calls) < MIN_CALLS or not trace.last_uses:
        return None
    begin = calls[0].begin  # what is older belongs to all of them
    frees: dict[int, int] = {}
    for call in calls:
        for index, birth in enumerate(lifetimes.births):
            used, death = trace.last_uses[index], lifetimes.deaths[index]
            if begin <= birth < call.end < death and used <= call.end and index not in trace.owners:
                frees[index] = call.end
        begin = call.end
    source = trace.source_at(calls[-1].source)
    line = file_and_line(source)
    change = (
        f"set create_graph=False at {line} ({plural(len(calls), 'gradient')} keep a graph), if no second derivatives "
        "are needed"
    )
    return GraphsInVain(frees, change, source)


def _list_calls_until_peak(context: Context) -> list[GraphBackward]:
    """Return the passes of one line, called from one place, since the last backward before the peak that is no such
    pass: those of the line that has most."""
    trace, peak = context.ledger.trace, context.ledger.peak_event
    calls = [call for call in trace.graph_backwards if call.begin <= peak and call.source != NONE]
    begins = [call.begin for call in calls]
    plain = [
        time
        for time, phase in context.phases
        if phase.kind is PhaseKind.BACKWARD and time <= peak and not _is_within(calls, begins, time)
    ]
    since = max(plain, default=NONE)
    lines: dict[tuple[int, int], list[GraphBackward]] = {}
    for call in calls:
        if call.begin > since:
            lines.setdefault((call.source, call.caller), []).append(call)
    return max(lines.values(), key=len, default=[])


def _is_within(calls: list[GraphBackward], begins: list[int], time: int) -> bool:
    position = bisect.bisect_right(begins, time) - 1
    return position >= 0 and time < calls[position].end
