"""Lives of blocks and the amounts after each event: of whole recordings, of parts, and of contradictory ones."""

from __future__ import annotations

import pytest

from memprof.allocator import Completion
from memprof.ledger.categories import Category
from memprof.snapshots.occupancy import list_segments
from memprof.snapshots.origins import UNKNOWN, Origin, Part
from memprof.snapshots.recording import BEFORE, NEVER, Recording, build_recordings
from memprof.trace.snapshot import Action, Snapshot, SnapshotEvent
from tests.unit.snapshots.builder import ACTIVATION, GRADIENT, INPUT, MIB, OPTIMIZER, Program, stack

BASE = 0x7F0000000000


def record(*events: tuple[Action, int, int], segments=()) -> Recording:
    """The recording of (action, address from BASE, bytes)."""
    trace = [SnapshotEvent(action, BASE + address, size, 0, (0, 0), None, ()) for action, address, size in events]
    (found,) = build_recordings(Snapshot(list(segments), [trace]))
    return found


def test_events_that_contradict_earlier_ones() -> None:
    a, b, c, d = 0, 4096, 8192, 16384
    found = record(
        (Action.SEGMENT_ALLOC, 0, 2 * MIB),
        (Action.ALLOC, a, 1000),
        (Action.ALLOC, a, 600),  # 2: the free of the first was not recorded
        (Action.FREE_REQUESTED, b, 512),  # nothing is there
        (Action.FREE_REQUESTED, a, 600),
        (Action.FREE_REQUESTED, a, 600),  # twice
        (Action.FREE_COMPLETED, a, 600),  # 6
        (Action.FREE_COMPLETED, a, 600),  # twice
        (Action.ALLOC, c, 512),
        (Action.FREE_COMPLETED, c, 512),  # 9: without a request
        (Action.ALLOC, d, 700),
        (Action.FREE_REQUESTED, d, 700),
        (Action.ALLOC, d, 100),  # 12: its free did not complete
        (Action.SEGMENT_MAP, 64 * MIB, 20 * MIB),
        (Action.SEGMENT_UNMAP, 64 * MIB, 20 * MIB),
        (Action.SEGMENT_FREE, 0, 2 * MIB),
    )
    assert found.unmatched_events == 5 and found.start == (0, 0, 0) and found.end == 15
    assert list(found.requested) == [0, 1000, 600, 600, 600, 600, 0, 0, 512, 0, 700, 700, 100, 100, 100, 100]
    assert list(found.allocated) == [0, 1024, 1024, 1024, 0, 0, 0, 0, 512, 0, 1024, 0, 512, 512, 512, 512]
    assert [size // MIB for size in found.reserved] == [2] * 13 + [22, 2, 0]
    assert [(life.born, life.freed, life.gone) for life in found.lives] == [
        (1, 2, 2), (2, 4, 6), (8, 9, 9), (10, 11, 12), (12, NEVER, NEVER),
    ]  # fmt: skip
    assert [len(found.alive(event)) for event in range(16)] == [0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1]


def test_a_recording_without_events() -> None:
    program = Program()
    program.malloc(1000, INPUT)
    snapshot = program.snapshot()
    snapshot.traces = [[]]
    (found,) = build_recordings(snapshot)
    assert found.start == found.at(BEFORE) == (1000, 1024, 2 * MIB) and found.end == BEFORE
    assert [found.peak(column) for column in ("requested", "allocated", "reserved")] == [
        (1000, BEFORE), (1024, BEFORE), (2 * MIB, BEFORE),
    ]  # fmt: skip


def test_the_peak_may_lie_before_the_recording() -> None:
    program = Program()
    first = program.malloc(30 * MIB)
    program.free(first)
    program.malloc(20 * MIB)
    (found,) = build_recordings(program.snapshot(last=3))
    assert found.start == (30 * MIB, 30 * MIB, 30 * MIB)
    assert (
        found.peak() == found.peak("requested") == (30 * MIB, 0)
        if found.allocated[0] == 30 * MIB
        else (30 * MIB, BEFORE)
    )
    assert found.peak("reserved") == (30 * MIB, 0)  # as much is reserved after the first event
    assert found.at(0) == (found.requested[0], found.allocated[0], found.reserved[0])


def waiting() -> Program:
    """A block of 30 MiB that stream 9 uses is freed, beside one of 20 MiB on stream 5; later its free completes."""
    program = Program()
    program.recorder.allocator.pending.completion = Completion.AT_SYNC
    block = program.malloc(30 * MIB, INPUT)
    program.malloc(20 * MIB, ACTIVATION, stream=5)
    assert block is not None
    program.recorder.allocator.record_stream(block, 9)
    program.free(block)
    program.malloc(1000, GRADIENT)
    program.recorder.allocator.pending.synchronize()
    return program


def test_a_free_that_waits_keeps_the_bytes_requested_but_not_allocated() -> None:
    (found,) = build_recordings(waiting().snapshot())
    # segment, block, segment, block, free requested, segment, block, free completed
    assert [size // MIB for size in found.requested] == [0, 30, 30, 50, 50, 50, 50, 20]
    assert [size // MIB for size in found.allocated] == [0, 30, 30, 50, 20, 20, 20, 20]
    assert [(life.freed, life.gone, life.stream) for life in found.lives] == [
        (4, 7, 0), (NEVER, NEVER, 5), (NEVER, NEVER, 0),
    ]  # fmt: skip


def test_a_block_whose_free_waited_when_the_recording_began() -> None:
    (found,) = build_recordings(waiting().snapshot(last=3))
    assert found.start == (50 * MIB, 20 * MIB, 50 * MIB)
    lives = sorted(found.lives, key=lambda life: -life.size)
    assert [(life.requested, life.born, life.freed, life.gone) for life in lives] == [
        (30 * MIB, BEFORE, BEFORE, 2), (20 * MIB, BEFORE, NEVER, NEVER), (1000, 1, NEVER, NEVER),
    ]  # fmt: skip
    assert [size // MIB for size in found.requested] == [50, 50, 20]
    # Stack and stream of what is still there are known from the final segments.
    old = next(life for life in found.lives if life.requested == 20 * MIB)
    assert (old.stream, old.stack, old.origin.op) == (5, ACTIVATION, "mul")
    gone = next(life for life in found.lives if life.requested == 30 * MIB)
    assert (gone.stack, gone.origin) == ((), UNKNOWN)


def test_an_address_that_is_used_again_says_nothing_of_the_block_before() -> None:
    program = Program()
    program.free(program.malloc(30 * MIB, INPUT))
    program.malloc(30 * MIB, ACTIVATION)
    (found,) = build_recordings(program.snapshot(last=3))
    old, new = found.lives
    assert (old.address, old.born) == (new.address, BEFORE)
    assert (old.stack, old.origin, new.stack) == ((), UNKNOWN, ACTIVATION)


def test_known_origins_are_those_of_the_allocations() -> None:
    program = Program()
    for _ in range(3):
        program.malloc(512, INPUT)
    known = Origin("model.py:1 f", "mm", "net", Part.BACKWARD, Category.GRADIENTS, in_module=True)
    (found,) = build_recordings(program.snapshot(), [known, None])
    assert found.exact_origins
    assert [life.origin.source for life in found.lives] == [
        "model.py:1 f",
        UNKNOWN.source,
        "/home/me/train.py:40 train",
    ]
    assert [life.category for life in found.lives] == [Category.GRADIENTS, Category.UNATTRIBUTED, Category.INPUTS]
    (guessed,) = build_recordings(program.snapshot())
    assert not guessed.exact_origins and {life.category for life in guessed.lives} == {Category.INPUTS}


# -- categories by lifetime --------------------------------------------------------------------------------------------

FORWARD = stack("attention.py:3 attend", op="mul_Tensor")
CALL = stack("block.py:20 forward", "call", "net.py:7 forward", "call", op="mul_Tensor")
NEXT_CALL = stack("block.py:20 forward", "call", "net.py:8 forward", "call", op="mul_Tensor")
OTHER_MODULE = stack("head.py:20 forward", "call", "net.py:7 forward", "call", op="mul_Tensor")
STEP = stack("my_adam.py:3 step", "train.py:9 f")


@pytest.mark.parametrize(
    ("frames", "then", "category"),
    [
        # Outside modules, until the next part of the step begins.
        (FORWARD, [FORWARD, "free", GRADIENT], "temporaries"),
        (FORWARD, [GRADIENT, "free"], "activations"),  # its backward frees it
        (FORWARD, [GRADIENT, STEP, "free"], "unattributed"),
        (FORWARD, [FORWARD], "unattributed"),  # never freed
        (FORWARD, [(), "free", FORWARD, GRADIENT], "temporaries"),  # no frames say nothing of a part
        # In a module's call, until something is allocated outside it.
        (CALL, [CALL, "free", NEXT_CALL], "temporaries"),
        (CALL, [NEXT_CALL, "free"], "activations"),
        (CALL, [OTHER_MODULE, "free"], "activations"),
        (CALL, [stack("net.py:7 forward", "call"), "free"], "activations"),
        (CALL, [FORWARD, "free"], "activations"),
        (stack("net.py:7 forward", "call"), [CALL, "free", FORWARD], "temporaries"),  # a call within it
        # In a backward, until the last allocation of the backward.
        (GRADIENT, [GRADIENT, "free", GRADIENT, STEP], "temporaries"),
        (GRADIENT, [GRADIENT, "free", STEP], "gradients"),
        (GRADIENT, [STEP, "free"], "gradients"),
        (STEP, [STEP, "free", FORWARD], "temporaries"),
        (STEP, [FORWARD, "free"], "optimizer state"),
        (OPTIMIZER, [FORWARD, "free"], "optimizer state"),
    ],
)
def test_categories_of_blocks_by_when_they_are_freed(frames, then: list, category: str) -> None:
    program = Program()
    block = program.malloc(4 * MIB, frames)
    for what in then:
        if what == "free":
            program.free(block)
        else:
            program.malloc(512, what)
    (found,) = build_recordings(program.snapshot())
    assert found.lives[0].category == category


@pytest.mark.parametrize("completes", [True, False])
@pytest.mark.parametrize(
    ("frames", "then", "later", "category"),
    [(CALL, CALL, NEXT_CALL, "temporaries"), (FORWARD, GRADIENT, STEP, "activations")],
)
def test_a_block_is_freed_when_the_program_frees_it(frames, then, later, category: str, completes: bool) -> None:
    """Although its memory is free only later, when another stream has done its work, or after the recording."""
    program = Program()
    program.recorder.allocator.pending.completion = Completion.AT_SYNC
    block = program.malloc(4 * MIB, frames)
    assert block is not None
    program.recorder.allocator.record_stream(block, 9)
    program.malloc(512, then)
    program.free(block)
    program.malloc(512, then)
    program.malloc(512, later)
    if completes:
        program.recorder.allocator.pending.synchronize()
    (found,) = build_recordings(program.snapshot())
    assert found.lives[0].gone == (found.end if completes else NEVER) and found.lives[0].category == category


@pytest.mark.parametrize(
    ("before", "after", "category"),
    [(False, True, "activations"), (False, False, "temporaries"), (True, False, "temporaries")],
)
def test_an_error_ends_lives_that_it_falls_into(before: bool, after: bool, category: str) -> None:
    program = Program(total_bytes=100 * MIB)
    if before:
        assert program.malloc(200 * MIB, FORWARD) is None
    block = program.malloc(60 * MIB, CALL)
    if after:
        assert program.malloc(200 * MIB, CALL) is None
    program.free(block)
    if not before and not after:
        assert program.malloc(200 * MIB, CALL) is None
    program.malloc(512, CALL)
    (found,) = build_recordings(program.snapshot())
    assert found.lives[0].category == category


@pytest.mark.parametrize(("is_freed", "category"), [(False, "library workspace"), (True, "activations")])
def test_a_workspace_of_cublas_is_known_by_its_size_and_never_freed(is_freed: bool, category: str) -> None:
    program = Program()
    block = program.malloc(8_519_680, stack("block.py:20 forward", "call"))
    program.malloc(512, FORWARD)
    if is_freed:
        program.free(block)
    (found,) = build_recordings(program.snapshot())
    assert found.lives[0].category == category


def test_each_device_has_its_own_segments_events_and_blocks() -> None:
    programs = Program(), Program()
    programs[0].malloc(30 * MIB, INPUT)
    programs[0].malloc(2 * MIB, INPUT, stream=5)
    programs[1].malloc(40 * MIB, ACTIVATION)
    first, second = (program.snapshot(last=1) for program in programs)
    segments = first.segments + [segment._replace(device=1) for segment in second.segments]
    found = build_recordings(Snapshot(segments, [first.traces[0], second.traces[0]]))
    assert [(one.device, one.start[2] // MIB, len(one.events)) for one in found] == [(0, 50, 1), (1, 40, 1)]
    assert [[life.size // MIB for life in one.lives] for one in found] == [[30, 2], [40]]
    assert [[segment.size // MIB for segment in list_segments(one, one.end, [])] for one in found] == [[20, 30], [40]]
    assert [segment.device for segment in found[1].final] == [1]
