"""Replays of a recording under other settings: each kind of event, by hand."""

from __future__ import annotations

import pytest

from memprof.allocator import Completion, parse_config
from memprof.snapshots.recording import Recording, build_recordings
from memprof.snapshots.what_if import ReplayOutcome, what_if
from memprof.trace.snapshot import Action, Snapshot
from tests.unit.snapshots.builder import MIB, Program

EXPANDABLE = parse_config("expandable_segments:True")


def only(program: Program, last: int | None = None) -> Recording:
    (found,) = build_recordings(program.snapshot(last))
    assert found.replay.exact
    return found


def test_each_amount_of_an_outcome() -> None:
    """Three segments: 2 MiB, 30 and 46, of which 1 MiB is not split off; expandable ones have 20 and 60 at most."""
    program = Program()
    program.malloc(1000)
    freed = program.malloc(30 * MIB)
    program.free(freed)
    program.malloc(45 * MIB)
    result = what_if(only(program), EXPANDABLE)
    assert result.before == ReplayOutcome("the defaults", 78 * MIB, 46 * MIB + 1024, 78 * MIB, 3, 3)
    assert result.after == ReplayOutcome("expandable_segments:True", 62 * MIB, 45 * MIB + 1024, 62 * MIB, 3, 2)
    assert (result.saved_bytes, result.recorded_peak_reserved_bytes) == (16 * MIB, 78 * MIB)
    assert result.failed_allocations == 0


def test_failed_allocations_are_left_out() -> None:
    program = Program(total_bytes=100 * MIB)
    program.malloc(60 * MIB)
    assert program.malloc(90 * MIB) is None and program.malloc(80 * MIB) is None
    result = what_if(only(program), EXPANDABLE)
    assert result.failed_allocations == 2 and result.after.peak_reserved_bytes == 60 * MIB


def test_blocks_from_before_the_recording_come_first() -> None:
    """On their streams, and in private pools if their segments are: both keep what they free from the others."""
    program = Program()
    old = program.malloc(30 * MIB, stream=7)
    program.malloc(20 * MIB)
    program.free(old)
    program.malloc(30 * MIB, stream=7)
    program.malloc(40 * MIB)
    found = only(program, last=5)
    result = what_if(found, found.replay.config)
    assert result.before == ReplayOutcome("the defaults", 90 * MIB, 90 * MIB, 90 * MIB, 3, 3)


def test_requests_are_served_on_their_stream() -> None:
    program = Program()
    program.free(program.malloc(30 * MIB, stream=7))
    program.malloc(30 * MIB)
    found = only(program)
    assert what_if(found, found.replay.config).before.peak_reserved_bytes == 60 * MIB


def test_private_pools_keep_their_memory() -> None:
    """Segments that a graph's pool freed serve no other request, named by the events (2.9) or by the segments alone."""
    program = Program()
    allocator, recorder = program.recorder.allocator, program.recorder
    allocator.create_pool((1, 0))
    block = allocator.malloc(30 * MIB, 0, (1, 0))
    recorder.write(Action.ALLOC, block.address, 30 * MIB)
    recorder.free(block)
    program.malloc(30 * MIB)
    snapshot = program.snapshot()
    for names_pool in (True, False):
        (events,) = snapshot.traces
        pool_id = (1, 0) if names_pool else (0, 0)
        inside = [event._replace(pool_id=pool_id) if event.address == block.address else event for event in events]
        (found,) = build_recordings(Snapshot(snapshot.segments, [inside], snapshot.settings))
        assert found.replay.exact
        assert what_if(found, found.replay.config).before.peak_reserved_bytes == 60 * MIB


@pytest.mark.parametrize("has_third", [True, False])
def test_frees_that_wait_for_another_stream_complete_where_they_did(has_third: bool) -> None:
    """Memory that stream 9 uses is free once its free completes: the second block needs a segment, not the third."""
    program = Program()
    program.recorder.allocator.pending.completion = Completion.AT_SYNC
    block = program.malloc(30 * MIB)
    assert block is not None
    program.recorder.allocator.record_stream(block, 9)
    program.free(block)
    second = program.malloc(30 * MIB)
    program.recorder.allocator.pending.synchronize()
    if has_third:
        program.malloc(30 * MIB)
    program.free(second)
    found = only(program)
    result = what_if(found, found.replay.config).before
    assert (result.peak_reserved_bytes, result.driver_allocations) == (60 * MIB, 2)
    assert result.peak_allocated_bytes == (60 if has_third else 30) * MIB


def test_empty_cache_is_called_where_it_was() -> None:
    program = Program()
    program.free(program.malloc(40 * MIB))
    program.recorder.allocator.empty_cache()
    program.free(program.malloc(30 * MIB))
    program.recorder.allocator.empty_cache()
    program.malloc(20 * MIB)
    found = only(program)
    assert what_if(found, found.replay.config).before == ReplayOutcome(
        "the defaults", 40 * MIB, 40 * MIB, 20 * MIB, 3, 1
    )


def test_a_free_without_its_block_is_passed_over() -> None:
    program = Program()
    program.free(program.malloc(30 * MIB))
    program.malloc(512)
    snapshot = program.snapshot()
    (events,) = snapshot.traces
    found = build_recordings(Snapshot(snapshot.segments, [list(events[2:])], snapshot.settings))[0]
    assert what_if(found, EXPANDABLE).after.peak_reserved_bytes >= 2 * MIB
