"""The memory at the beginning of a recording, by undoing its events from the final segments."""

from __future__ import annotations

import pytest

from memprof.allocator import AllocatorConfig, CachingAllocator, Completion, parse_config
from memprof.allocator.initial_state import State, completes_at_once, rebuild_initial_state, restore
from memprof.trace.columns import EventColumns
from memprof.trace.snapshot import Action, BlockState, SnapshotBlock, SnapshotEvent, SnapshotSegment

MIB = 1 << 20
SEGMENT, MAPPED = 1 << 40, 2 << 40  # addresses of a segment of 30 MiB, and of 40 MiB of an expandable one
ALLOC, REQUESTED, COMPLETED = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED
TAKEN, RELEASED = Action.SEGMENT_ALLOC, Action.SEGMENT_FREE
MAP, UNMAP = Action.SEGMENT_MAP, Action.SEGMENT_UNMAP


def segment(address: int, size: int, *, expandable: bool = False, state: BlockState = BlockState.INACTIVE):
    block = SnapshotBlock(address, size, size, state)
    return SnapshotSegment(0, address, size, 0, False, (0, 0), expandable, (block,))


def columns(*events: tuple[Action, int, int], stream: int = 0) -> EventColumns:
    return EventColumns.of([SnapshotEvent(*event, stream, (0, 0), None, ()) for event in events])


def undo(*events: tuple[Action, int, int], conf: str = "", stream: int = 0, segments=None) -> State:
    if segments is None:
        segments = [segment(SEGMENT, 30 * MIB), segment(MAPPED, 40 * MIB, expandable=True)]
    config = parse_config(conf) if conf else AllocatorConfig()
    return rebuild_initial_state(segments, columns(*events, stream=stream), config)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ((TAKEN, SEGMENT, 30 * MIB), None),
        ((TAKEN, SEGMENT, 28 * MIB), "takes a segment"),
        ((TAKEN, SEGMENT + 2 * MIB, 28 * MIB), "takes a segment"),
        ((TAKEN, MAPPED, 40 * MIB), "takes a segment"),  # it is a mapping
        ((MAP, MAPPED, 40 * MIB), None),
        ((MAP, MAPPED + 20 * MIB, 20 * MIB), None),
        ((MAP, MAPPED + 20 * MIB, 20 * MIB + 1), "maps memory"),  # over the end
        ((MAP, MAPPED - 1, 20 * MIB), "maps memory"),
        ((MAP, MAPPED + 40 * MIB, 1), "maps memory"),
        ((MAP, SEGMENT, 30 * MIB), "maps memory"),  # it is no mapping
        ((RELEASED, SEGMENT - 20 * MIB, 20 * MIB), None),
        ((RELEASED, SEGMENT - 20 * MIB, 20 * MIB + 1), "gives memory"),  # into what is there
        ((RELEASED, SEGMENT + 30 * MIB, 20 * MIB), None),
        ((RELEASED, SEGMENT + 30 * MIB - 1, 20 * MIB), "gives memory"),
        ((RELEASED, SEGMENT, 30 * MIB), "gives memory"),
        ((RELEASED, SEGMENT - 20 * MIB, 90 * MIB), "gives memory"),  # around it
        ((RELEASED, 3 << 40, 0), "gives memory"),
        ((UNMAP, MAPPED + 40 * MIB, 20 * MIB), None),
        ((UNMAP, MAPPED + 30 * MIB, 20 * MIB), "gives memory"),
        ((ALLOC, SEGMENT, 512), "allocates"),  # nothing frees it
        ((REQUESTED, SEGMENT, 512), "never completes"),
        ((COMPLETED, SEGMENT, 512), None),
    ],
)
def test_events_that_contradict_what_is_there_afterwards(event, problem):
    contradictions = undo(event).contradictions
    assert (
        (contradictions == []) if problem is None else (problem in contradictions[0] and "event 0" in contradictions[0])
    )


def ranges(state: State) -> list[tuple[int, int]]:
    return [(run.address, run.size // MIB) for run in state.ranges]


def test_mappings_are_taken_out_of_their_range_and_unmapped_ranges_join_it():
    fixed = (SEGMENT, 30)
    assert ranges(undo((MAP, MAPPED, 20 * MIB))) == [fixed, (MAPPED + 20 * MIB, 20)]
    assert ranges(undo((MAP, MAPPED + 20 * MIB, 20 * MIB))) == [fixed, (MAPPED, 20)]
    assert ranges(undo((MAP, MAPPED + 10 * MIB, 20 * MIB))) == [fixed, (MAPPED, 10), (MAPPED + 30 * MIB, 10)]
    assert ranges(undo((UNMAP, MAPPED + 40 * MIB, 20 * MIB))) == [fixed, (MAPPED, 60)]
    assert ranges(undo((UNMAP, MAPPED - 20 * MIB, 20 * MIB))) == [fixed, (MAPPED - 20 * MIB, 60)]
    assert ranges(undo((UNMAP, MAPPED + 41 * MIB, 20 * MIB))) == [fixed, (MAPPED, 40), (MAPPED + 41 * MIB, 20)]
    assert ranges(undo((UNMAP, SEGMENT + 30 * MIB, 20 * MIB))) == [fixed, (SEGMENT + 30 * MIB, 20), (MAPPED, 40)]
    # A hole between two ranges is filled.
    two = [segment(MAPPED, 20 * MIB, expandable=True), segment(MAPPED + 40 * MIB, 20 * MIB, expandable=True)]
    assert ranges(undo((UNMAP, MAPPED + 20 * MIB, 20 * MIB), segments=two)) == [(MAPPED, 60)]
    assert ranges(undo((RELEASED, MAPPED + 20 * MIB, 20 * MIB), segments=two)) == [
        (MAPPED, 20), (MAPPED + 20 * MIB, 20), (MAPPED + 40 * MIB, 20),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("action", "size", "conf", "is_small"),
    [
        (RELEASED, 2 * MIB, "", True),
        (RELEASED, 20 * MIB, "", False),
        (RELEASED, 4 * MIB, "", False),
        (UNMAP, 2 * MIB, "", True),
        (UNMAP, 18 * MIB, "", True),
        (UNMAP, 40 * MIB, "", False),
        (UNMAP, 40 * MIB, "large_segment_size_mb:32", True),
        (UNMAP, 64 * MIB, "large_segment_size_mb:32", False),
    ],
)
def test_the_pool_of_what_is_released(action, size, conf, is_small):
    (run,) = undo((action, 3 << 40, size), conf=conf, stream=7, segments=[]).ranges
    assert (run.address, run.size, run.stream, run.pool_id) == (3 << 40, size, 7, (0, 0))
    assert (run.is_small, run.expandable) == (is_small, action is UNMAP)


@pytest.mark.parametrize(
    ("events", "is_pending", "state"),
    [
        ([], False, BlockState.ALLOCATED),
        ([], True, BlockState.PENDING_FREE),
        ([(REQUESTED, SEGMENT, 30 * MIB)], False, BlockState.PENDING_FREE),
        ([(REQUESTED, SEGMENT, 30 * MIB), (COMPLETED, SEGMENT, 30 * MIB)], False, BlockState.INACTIVE),
        ([(COMPLETED, SEGMENT, 30 * MIB)], True, BlockState.INACTIVE),
    ],
)
def test_live_blocks_and_those_that_wait(events, is_pending, state):
    found = undo(*events, segments=[segment(SEGMENT, 30 * MIB, state=state)])
    (live,) = found.live.values()
    assert (live.address, live.requested, live.size, live.pending) == (SEGMENT, 30 * MIB, 30 * MIB, is_pending)
    assert found.contradictions == []


def test_blocks_of_the_recording_itself_are_not_there_at_the_beginning():
    events = [(ALLOC, SEGMENT, 512), (REQUESTED, SEGMENT, 512), (COMPLETED, SEGMENT, 512), (ALLOC, SEGMENT, 1024)]
    final = [segment(SEGMENT, 30 * MIB, state=BlockState.ALLOCATED)]
    found = undo(*events, segments=final)
    assert found.live == {} and found.contradictions == []
    twice = undo((COMPLETED, SEGMENT, 512), (COMPLETED, SEGMENT, 512), segments=final)
    assert "is live after it" in twice.contradictions[0]


def test_blocks_where_there_is_no_memory():
    nowhere = undo((COMPLETED, 3 << 40, 512))
    assert nowhere.live == {} and "is in no segment" in nowhere.contradictions[0]
    below = undo((COMPLETED, 512, 512))
    assert below.live == {} and "is in no segment" in below.contradictions[0]
    behind = undo((COMPLETED, SEGMENT + 30 * MIB, 512))
    assert behind.live == {}
    too_large = undo((COMPLETED, SEGMENT + 20 * MIB, 11 * MIB))
    assert "does not fit in its place" in too_large.contradictions[0]
    assert [live.size for live in too_large.live.values()] == [10 * MIB]
    overlapping = undo((COMPLETED, SEGMENT, 11 * MIB), (COMPLETED, SEGMENT + 10 * MIB, 20 * MIB))
    assert {address: live.size for address, live in overlapping.live.items()} == {
        SEGMENT: 10 * MIB, SEGMENT + 10 * MIB: 20 * MIB,
    }  # fmt: skip


def test_requests_are_rounded_by_the_settings():
    for conf, size in (("", 5 * MIB + 512), ("roundup_power2_divisions:4", 5 * MIB)):
        request = 5 * MIB - 512 if conf else 5 * MIB + 1
        (live,) = undo((COMPLETED, MAPPED, request), conf=conf).live.values()
        assert live.size == size


def test_a_block_without_its_request_counts_as_its_size():
    block = SnapshotBlock(SEGMENT, 30 * MIB, None, BlockState.ALLOCATED)
    (live,) = undo(segments=[segment(SEGMENT, 30 * MIB)._replace(blocks=(block,))]).live.values()
    assert (live.requested, live.size) == (30 * MIB, 30 * MIB)


def test_known_addresses_are_those_of_mappings_by_stream_and_pool():
    found = undo(
        (MAP, MAPPED + 20 * MIB, 20 * MIB), (UNMAP, MAPPED + 60 * MIB, 2 * MIB), (UNMAP, MAPPED - 20 * MIB, 20 * MIB)
    )
    assert found.known_addresses == {
        (0, False): [MAPPED - 20 * MIB, MAPPED - 20 * MIB, MAPPED + 20 * MIB],
        (0, True): [MAPPED + 60 * MIB, MAPPED + 60 * MIB],
    }


def test_a_free_completes_at_once_if_the_next_event_completes_it():
    events = columns(
        (REQUESTED, 1, 512), (COMPLETED, 1, 512), (REQUESTED, 2, 512), (COMPLETED, 1, 512), (REQUESTED, 3, 512)
    )
    assert [completes_at_once(events, index) for index in (0, 2, 4)] == [True, False, False]
    assert not completes_at_once(columns((REQUESTED, 1, 512), (ALLOC, 1, 512)), 0)


def test_an_allocator_in_the_state_of_the_beginning():
    """A segment of another stream and pool with two live blocks, and 60 MiB of an expandable one with a hole."""
    fixed = segment(SEGMENT, 30 * MIB)._replace(stream=7, pool_id=(0, 3))
    mapped = [segment(MAPPED + at * MIB, size * MIB, expandable=True) for at, size in ((0, 40), (60, 20))]
    state = undo(
        (COMPLETED, SEGMENT + 2 * MIB, 3 * MIB), (REQUESTED, SEGMENT + 20 * MIB, 10 * MIB),
        (COMPLETED, SEGMENT + 20 * MIB, 10 * MIB), (COMPLETED, MAPPED + 60 * MIB, 20 * MIB - 100),
        segments=[fixed, *mapped],
    )  # fmt: skip
    memory = CachingAllocator(
        None, AllocatorConfig(expandable_segments=True), completion=Completion.AT_SYNC, counts=False
    )
    blocks = restore(memory, state)
    assert {address: (block.size, block.requested) for address, block in blocks.items()} == {
        SEGMENT + 2 * MIB: (3 * MIB, 3 * MIB),
        SEGMENT + 20 * MIB: (10 * MIB, 10 * MIB),
        MAPPED + 60 * MIB: (20 * MIB, 20 * MIB - 100),
    }
    found = memory.segments()
    assert [(one.address, one.size, one.stream, one.pool_id, one.expandable) for one in found] == [
        (SEGMENT, 30 * MIB, 7, (0, 3), False),
        (MAPPED, 40 * MIB, 0, (0, 0), True),
        (MAPPED + 60 * MIB, 20 * MIB, 0, (0, 0), True),
    ]
    assert [[(block.size // MIB, block.state) for block in one.blocks] for one in found] == [
        [(2, "inactive"), (3, "active_pending_free"), (15, "inactive"), (10, "active_allocated")],
        [(40, "inactive")],
        [(20, "active_pending_free")],
    ]
    assert memory.segment_store.total_bytes == 90 * MIB and memory.pending.requested_bytes == 23 * MIB - 100
    # The hole is filled, and what waits is freed when its stream is done.
    assert memory.malloc(50 * MIB).address == MAPPED and memory.segment_store.total_bytes == 110 * MIB
    memory.pending.complete(blocks[SEGMENT + 2 * MIB])
    assert memory.malloc(20 * MIB, 7, (0, 3)).address == SEGMENT
