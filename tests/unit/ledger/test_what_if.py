"""A trace with memory that is freed earlier: the same events in the same order, but for the frees."""

from __future__ import annotations

from memprof.ledger.what_if import free_earlier
from memprof.trace.events import GPU, Event, EventKind, Workspace
from tests.unit.traces import TraceBuilder

ALLOC, FREE = EventKind.ALLOC, EventKind.FREE


def test_frees_are_moved_or_added() -> None:
    b = TraceBuilder(first=None)
    first, second, third = (b.alloc(512) for _ in range(3))
    b.free(first)
    b.alloc(512)
    events = free_earlier(b.trace, {first: 1, third: 3}).events
    assert events == [
        Event(ALLOC, first), Event(FREE, first), Event(ALLOC, second), Event(ALLOC, third), Event(FREE, third),
        Event(ALLOC, 3),
    ]  # fmt: skip
    assert len(b.trace.events) == 5, "the trace itself is unchanged"


def test_workspaces_point_at_the_same_allocations() -> None:
    b = TraceBuilder(first=None)
    first = b.alloc(512)
    before = b.alloc(512)
    b.free(before)
    b.free(first)
    after = b.alloc(512)
    b.free(after)
    b.trace.workspaces += [Workspace(1, GPU, 512, 512), Workspace(4, GPU, 512, 512)]
    moved = free_earlier(b.trace, {first: 1})
    assert [moved.events[one.event] for one in moved.workspaces] == [Event(ALLOC, before), Event(ALLOC, after)]
