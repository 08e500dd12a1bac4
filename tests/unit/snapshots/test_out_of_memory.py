"""What is said of a failed allocation: its amounts and the reasons, by hand."""

from __future__ import annotations

import pytest

from memprof.snapshots.out_of_memory import OutOfMemoryEvent, find_out_of_memory_events
from memprof.snapshots.recording import build_recordings
from memprof.trace.snapshot import Action, Snapshot
from tests.unit.snapshots.builder import MIB, Program, stack


def refusals(program: Program) -> list[OutOfMemoryEvent]:
    (found,) = build_recordings(program.snapshot())
    return find_out_of_memory_events(found)


def test_amounts_of_a_failed_allocation() -> None:
    """Beside the pool and the stream of the request, two others have free memory."""
    program = Program(total_bytes=100 * MIB)
    kept = [program.malloc(9 * MIB, stream=stream) for stream in (0, 0, 0, 0, 5, 5)]
    program.malloc(1000)
    program.free(kept[0], kept[4])
    assert program.malloc(45 * MIB + 1, stack("a.py:7 f")) is None
    (found,) = refusals(program)
    assert found.event == len(program.recorder.events) - 1 and found.source == "/home/me/a.py:7 f"
    assert (found.requested_bytes, found.tried_bytes) == (45 * MIB + 1, 46 * MIB)
    assert (found.device_free_bytes, found.reserved_bytes) == (38 * MIB, 62 * MIB)
    assert (found.allocated_bytes, found.cached_bytes) == (36 * MIB + 1024, 26 * MIB - 1024)
    assert (found.usable_bytes, found.largest_free_bytes, found.fragmented) == (13 * MIB, 9 * MIB, True)
    text = "\n".join(found.reasons)
    assert "45.00 MiB were requested; the GPU had 38.00 MiB free" in text
    assert "torch held 62.00 MiB, 36.00 MiB of it in use and 26.00 MiB cached" in text
    assert (
        "of the cache, 13.00 MiB are in the large pool of stream 0, and the largest free block there has 9.00 MiB"
        in text
    )
    assert "every segment with free memory there (2) holds a block in use" in text
    assert "expandable_segments:True can use it" in text


def test_a_small_request_on_a_stream_without_memory() -> None:
    program = Program(total_bytes=20 * MIB)
    kept = program.malloc(9 * MIB)
    assert kept is not None and program.malloc(1000, stream=5) is None
    (found,) = refusals(program)
    assert (found.requested_bytes, found.tried_bytes, found.device_free_bytes) == (1000, 2 * MIB, 0)
    assert (found.usable_bytes, found.largest_free_bytes, found.cached_bytes) == (0, 0, 11 * MIB)
    text = "\n".join(found.reasons)
    assert "0 bytes are in the small pool of stream 5" in text and "holds a block in use" not in text


def test_a_gpu_whose_memory_is_in_use() -> None:
    """In one piece the rest would do, but it is little: 1.75 of 20 MiB."""
    program = Program(total_bytes=20 * MIB)
    for size in (8 * MIB, 9 * MIB, 5 * MIB // 4):
        program.malloc(size)
    assert program.malloc(MIB // 2) is None
    (found,) = refusals(program)
    assert (found.cached_bytes, found.fragmented) == (7 * MIB // 4, False)
    assert "the GPU is full: 91% of what torch holds is in use" in found.reasons[-1]
    assert found.reasons[-1].endswith("and 1.25 MiB more")


@pytest.mark.parametrize("held", [0, 20 * MIB])
def test_a_segment_that_is_larger_than_what_is_free_is_no_fragmentation(held: int) -> None:
    """5 MiB are served from a segment of 20 MiB, and the GPU has 15 MiB."""
    program = Program(total_bytes=held + 15 * MIB)
    if held:
        program.malloc(held)
    assert program.malloc(5 * MIB) is None
    (found,) = refusals(program)
    assert (found.reserved_bytes, found.cached_bytes, found.tried_bytes) == (held, 0, 20 * MIB)
    assert not found.fragmented
    assert found.reasons[-1] == "torch asks the GPU for a segment of 20.00 MiB, which is more than is free"


def test_nothing_cached_and_nothing_held() -> None:
    program = Program(total_bytes=60 * MIB)
    assert program.malloc(70 * MIB) is None
    program.malloc(60 * MIB)
    assert program.malloc(30 * MIB) is None
    empty, full = refusals(program)
    assert (empty.reserved_bytes, empty.usable_bytes, empty.largest_free_bytes, empty.fragmented) == (0, 0, 0, False)
    assert "not fragmentation: even with the whole cache 10.00 MiB would have been missing" in empty.reasons
    assert len(full.reasons) == 3 and "30.00 MiB would have been missing" in full.reasons[-1]


def test_expandable_segments_try_what_is_requested() -> None:
    program = Program("expandable_segments:True", total_bytes=100 * MIB)
    program.malloc(45 * MIB)
    program.malloc(30 * MIB, stream=5)
    assert program.malloc(90 * MIB) is None
    (found,) = refusals(program)
    assert (found.tried_bytes, found.device_free_bytes) == (90 * MIB, 0)
    assert not any("can use it" in reason for reason in found.reasons)


@pytest.mark.parametrize(("device_free", "is_limited"), [(32 * MIB, True), (32 * MIB - 1, False)])
def test_a_limit_of_the_process_is_no_fragmentation(device_free: int, is_limited: bool) -> None:
    """The segment of 32 MiB fitted into what the GPU had free: torch was not allowed to take it."""
    program = Program()
    kept = [program.malloc(9 * MIB) for _ in range(2)]
    program.free(kept[0])
    program.malloc(1000)
    snapshot = program.snapshot()
    (events,) = snapshot.traces
    oom = events[1]._replace(action=Action.OOM, address=device_free, size=31 * MIB)
    (found,) = build_recordings(Snapshot(snapshot.segments, [[*events, oom]], snapshot.settings))
    (refusal,) = find_out_of_memory_events(found)
    assert refusal.tried_bytes == 32 * MIB and refusal.fragmented != is_limited
    assert any("a limit of the process was reached" in reason for reason in refusal.reasons) == is_limited


@pytest.mark.parametrize(("num_bytes", "unit"), [(30 * MIB, 40 * MIB), (1000, 2 * MIB)])
def test_a_limit_where_expandable_segments_are_mapped_in_units(num_bytes: int, unit: int) -> None:
    program = Program("expandable_segments:True")
    program.malloc(30 * MIB)
    snapshot = program.snapshot()
    (events,) = snapshot.traces
    for device_free, is_limited in ((unit, True), (unit - 1, False)):
        oom = events[1]._replace(action=Action.OOM, address=device_free, size=num_bytes)
        (found,) = build_recordings(Snapshot(snapshot.segments, [[*events, oom]], snapshot.settings))
        (refusal,) = find_out_of_memory_events(found)
        assert any("a limit of the process" in reason for reason in refusal.reasons) == is_limited


def test_segments_of_both_kinds() -> None:
    program = Program("expandable_segments:True", total_bytes=100 * MIB)
    program.malloc(20 * MIB)
    program.recorder.allocator.expandable = False  # as a program may set it
    program.malloc(30 * MIB)
    program.recorder.allocator.expandable = True
    assert program.malloc(91 * MIB) is None
    (found,) = refusals(program)
    assert found.tried_bytes == 91 * MIB


def test_memory_that_was_free_and_not_released() -> None:
    """The recording of another program, such as one whose limit is below what torch holds."""
    program = Program(total_bytes=60 * MIB)
    program.free(program.malloc(40 * MIB))
    snapshot = program.snapshot()
    (events,) = snapshot.traces
    oom = events[1]._replace(action=Action.OOM, address=20 * MIB, size=50 * MIB)
    (found,) = build_recordings(Snapshot(snapshot.segments, [[*events, oom]], snapshot.settings))
    (refusal,) = find_out_of_memory_events(found)
    assert "40.00 MiB were wholly free, and were not released" in refusal.reasons
    assert refusal.fragmented and refusal.largest_free_bytes == 40 * MIB
