"""Traces with memory that is smaller, or lives at other times, for a replay of what the run would need then."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from memprof.allocator.rounding import round_request
from memprof.trace.events import Event, EventKind, Trace


def free_earlier(trace: Trace, frees: Mapping[int, int]) -> Trace:
    """Return `trace` with storages freed before the given events; `frees` maps a storage to the event's index."""
    removed = [time for time, (kind, ref) in enumerate(trace.events) if kind is EventKind.FREE and ref in frees]
    inserted: dict[int, list[Event]] = defaultdict(list)
    for storage, time in frees.items():
        inserted[time].append(Event(EventKind.FREE, storage))
    return edit_events(trace, inserted, removed)


def resize(trace: Trace, sizes: Mapping[int, int]) -> Trace:
    """Return `trace` with other sizes in bytes of the storages in `sizes`; one of 0 bytes takes no memory."""
    storages = list(trace.storages)
    for index, num_bytes in sizes.items():
        storages[index] = storages[index]._replace(num_bytes=num_bytes)
    return dataclasses.replace(trace, storages=storages)


def compute_allocated_peak(trace: Trace) -> int:
    """Return the most bytes of blocks that are allocated at once, without a replay of segments."""
    sizes = [
        round_request(s.num_bytes, s.device) if s.num_bytes and s.device == trace.device else 0 for s in trace.storages
    ]
    live: set[int] = set()
    allocated = peak = 0
    alloc, free = EventKind.ALLOC, EventKind.FREE  # as local names, which halve the time
    for kind, ref in trace.events:
        if kind is alloc:
            if ref not in live:
                live.add(ref)
                allocated += sizes[ref]
                if allocated > peak:
                    peak = allocated
        elif kind is free and ref in live:
            live.remove(ref)
            allocated -= sizes[ref]
    return peak


def edit_events(trace: Trace, inserted: Mapping[int, Sequence[Event]], removed: Collection[int]) -> Trace:
    """Return `trace` without the events at the indices `removed`, and with `inserted` ones before the given indices.

    The result is for a replay: of the tables that point at events only `workspaces` follows. A storage that is freed
    may be allocated again.
    """
    skipped = frozenset(removed)
    events: list[Event] = []
    for time, event in enumerate(trace.events):
        events += inserted.get(time, ())
        if time not in skipped:
            events.append(event)
    added = sorted(time for time, new in inserted.items() for _ in new)
    dropped = sorted(skipped)
    workspaces = [
        one._replace(event=one.event + bisect.bisect_right(added, one.event) - bisect.bisect_left(dropped, one.event))
        for one in trace.workspaces
    ]
    return dataclasses.replace(trace, events=events, workspaces=workspaces)
