"""Traces with memory that is freed earlier, for a replay of what the run would need then."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

from memprof.trace.events import Event, EventKind, Trace


def free_earlier(trace: Trace, frees: Mapping[int, int]) -> Trace:
    """Return `trace` with storages freed before the given events; `frees` maps a storage to the event's index.

    The result is for a replay: of the tables that point at events only `workspaces` follows.
    """
    removed = [time for time, (kind, ref) in enumerate(trace.events) if kind is EventKind.FREE and ref in frees]
    skipped = frozenset(removed)
    by_time: dict[int, list[Event]] = {}
    for storage, time in frees.items():
        by_time.setdefault(time, []).append(Event(EventKind.FREE, storage))
    events: list[Event] = []
    for time, event in enumerate(trace.events):
        events += by_time.get(time, ())
        if time not in skipped:
            events.append(event)
    added = sorted(frees.values())
    workspaces = [
        one._replace(event=one.event + bisect.bisect_right(added, one.event) - bisect.bisect_left(removed, one.event))
        for one in trace.workspaces
    ]
    return dataclasses.replace(trace, events=events, workspaces=workspaces)
