"""StreamScripts on several streams: whose blocks are whose, and when what was freed is free."""

from __future__ import annotations

import itertools
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.allocator import Completion, TraceReplay, replay_on_gpu
from memprof.snapshots.from_trace import convert_to_snapshot
from memprof.trace.events import EventKind
from memprof.trace.snapshot import Action
from tests.lanes import examples
from tests.unit.allocator.traces import MIB, StreamScript

STREAMS = (0, 1, 7)


def lent() -> StreamScript:
    """Memory of stream 1 that was lent to the default one, and given up."""
    program = StreamScript()
    batch = program.alloc(40 * MIB, stream=1)
    program.use(batch, 0)
    program.free(batch)
    return program


def test_what_another_stream_used_is_not_free_before_its_work_is_done() -> None:
    program = lent()
    assert [program.active(one) for one in Completion] == [0, 40, 40]
    program.wait(7, by_host=True)  # another one
    assert [program.active(one) for one in Completion] == [0, 40, 40]
    program.wait(0, by_host=False)  # by a stream: the host knows nothing of it
    assert [program.active(one) for one in Completion] == [0, 0, 40]
    program.wait(0, by_host=True)
    assert [program.active(one) for one in Completion] == [0, 0, 0]


def test_an_event_from_before_says_nothing_of_what_came_after() -> None:
    program = lent()
    program.wait(0, by_host=True, before=len(program.trace.events) - 1)
    assert program.active() == 40


def test_a_phase_that_ends_has_been_done() -> None:
    program = lent()
    program.add(EventKind.PHASE, 0)
    assert [program.active(one) for one in Completion] == [0, 0, 40]


def test_the_allocator_waits_itself() -> None:
    program = lent()
    program.add(EventKind.EMPTY_CACHE, 0)
    assert [program.active(one) for one in Completion] == [0, 0, 0]


def test_a_block_that_waits_is_neither_allocated_nor_requested() -> None:
    run = replay_on_gpu(lent().trace, None)
    assert (run.timeline.requested[-1], run.timeline.allocated[-1], run.timeline.reserved[-1]) == (0, 0, 40 * MIB)
    assert run.timeline.segments[0].blocks[0].state == "active_pending_free"


def test_both_bounds_of_what_is_reserved() -> None:
    program = lent()
    program.wait(0, by_host=False)
    program.alloc(40 * MIB, stream=1)
    run = replay_on_gpu(program.trace, None)
    assert run.bounds is not None and run.required_reserved_bytes == 40 * MIB
    assert (run.bounds.lower_bound_bytes, run.bounds.upper_bound_bytes) == (40 * MIB, 80 * MIB)
    alone = StreamScript()
    alone.alloc(MIB)
    assert replay_on_gpu(alone.trace, None).bounds is None


def test_a_recording_of_it_completes_frees_when_they_are_done() -> None:
    program = lent()
    program.alloc(50 * MIB, stream=1)
    program.wait(0, by_host=True)
    program.alloc(40 * MIB, stream=1)
    made = convert_to_snapshot(program.trace, replay_on_gpu(program.trace, None).config, None).snapshot
    assert [event.action for event in made.traces[0]] == [
        Action.SEGMENT_ALLOC, Action.ALLOC, Action.FREE_REQUESTED,
        Action.SEGMENT_ALLOC, Action.ALLOC, Action.FREE_COMPLETED, Action.ALLOC,
    ]  # fmt: skip


def random_program(seed: int) -> StreamScript:
    r, program = random.Random(seed), StreamScript()
    for _ in range(120):
        choice = r.random()
        living = list(program.home)
        if choice < 0.45 or not living:
            program.alloc(r.choice((700, 3 * MIB, 12 * MIB, 40 * MIB)), stream=r.choice(STREAMS))
        elif choice < 0.6:
            program.use(r.choice(living), r.choice(STREAMS))
        elif choice < 0.85:
            program.free(r.choice(living))
        elif choice < 0.97:
            before = r.randrange(len(program.trace.events) + 1)
            program.wait(r.choice(STREAMS), by_host=r.random() < 0.4, before=before)
        else:
            program.add(*r.choice(((EventKind.PHASE, 0), (EventKind.EMPTY_CACHE, 0))))
    return program


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30))
@example(7)
@example(8)
def test_no_block_is_shared_and_the_sooner_the_less_is_held(seed: int) -> None:
    program = random_program(seed)
    homes: dict[int, int] = {}
    stream = 0
    for kind, ref in program.trace.events:
        stream = ref if kind is EventKind.STREAM else stream
        if kind is EventKind.ALLOC:
            homes[ref] = stream
    held: list[list[int]] = []
    for completion in Completion:
        replay = TraceReplay(program.trace, None, completion=completion)
        held.append([])
        for event in range(len(program.trace.events)):
            replay.advance(event + 1)
            held[-1].append(replay.allocator.counters.requested_bytes)
            places = sorted((block.address, block.address + block.size) for block in replay.live.values())
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(places))
            assert all(block.owner.stream == homes[index] for index, block in replay.live.items())
        assert replay.allocator.counters.allocated_bytes == sum(block.size for block in replay.live.values())
    assert all(soonest <= rule <= latest for soonest, rule, latest in zip(*held, strict=True))
