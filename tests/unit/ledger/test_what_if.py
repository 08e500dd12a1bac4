"""A trace with memory that is freed earlier: the same events in the same order, but for the frees."""

from __future__ import annotations

from memprof.allocator import AllocatorConfig, compute_memory_needs
from memprof.ledger.what_if import compute_allocated_peak, edit_events, free_earlier, resize
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


def test_other_sizes() -> None:
    b = TraceBuilder(first=None)
    first, second = b.alloc(512), b.alloc(1024)
    changed = resize(b.trace, {first: 100, second: 0})
    assert [storage.num_bytes for storage in changed.storages] == [100, 0]
    assert [storage.num_bytes for storage in b.trace.storages] == [512, 1024], "the trace itself is unchanged"


def test_a_storage_that_lives_twice_is_replayed_twice() -> None:
    b = TraceBuilder(first=None)
    first = b.alloc(4 << 20)
    second = b.alloc(8 << 20)
    b.free(second)
    third = b.alloc(2 << 20)
    b.free(first, third)
    changed = edit_events(b.trace, {1: [Event(FREE, first)], 3: [Event(ALLOC, first)]}, ())
    assert changed.events[1:6] == [
        Event(FREE, first), Event(ALLOC, second), Event(FREE, second), Event(ALLOC, first), Event(ALLOC, third),
    ]  # fmt: skip
    needs = compute_memory_needs(changed, None, AllocatorConfig())
    assert needs.allocated_bytes == compute_allocated_peak(changed) == 8 << 20
    assert compute_allocated_peak(b.trace) == 12 << 20


def test_the_allocated_peak_is_that_of_the_replay() -> None:
    b = TraceBuilder(first=None)
    for num_bytes in (1, 513, 0, 3 << 20):
        b.free(b.alloc(7 << 20))
        b.alloc(num_bytes)
    b.alloc(100, device="cpu")
    assert compute_allocated_peak(b.trace) == compute_memory_needs(b.trace, None, AllocatorConfig()).allocated_bytes


def test_a_storage_that_is_live_or_gone_already_changes_nothing() -> None:
    b = TraceBuilder(first=None)
    first = b.alloc(512)
    b.add(ALLOC, first)
    b.free(first, first)
    b.add(EventKind.EMPTY_CACHE, first)
    b.alloc(1024)
    b.alloc(4096, device="cuda:1")
    b.alloc(0)
    assert compute_allocated_peak(b.trace) == 1024


def test_workspaces_follow_what_is_inserted_and_removed_before_them() -> None:
    b = TraceBuilder(first=None)
    first, second = b.alloc(512), b.alloc(512)
    b.free(first)
    workspace = b.alloc(512)
    b.free(workspace)
    b.trace.workspaces.append(Workspace(3, GPU, 512, 512))
    new = [Event(FREE, second), Event(ALLOC, second)]
    for inserted, removed, event in (
        ({3: new}, (), 5),
        ({4: new}, (), 3),
        ({}, (2,), 2),
        ({}, (4,), 3),
        ({0: new}, (0, 2), 3),
    ):
        moved = edit_events(b.trace, inserted, removed)
        assert [one.event for one in moved.workspaces] == [event]
        assert moved.events[event] == Event(ALLOC, workspace)


def test_a_call_without_a_workspace_stays_behind_the_events_before_it() -> None:
    b = TraceBuilder(first=None)
    b.free(b.alloc(512))
    b.free(b.alloc(512))
    b.trace.workspaces.append(Workspace(2, GPU, 0, 512))
    assert [edit_events(b.trace, {}, removed).workspaces[0].event for removed in ((2,), (1, 2), (3,))] == [2, 1, 2]
