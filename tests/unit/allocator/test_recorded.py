"""Recordings of random programs, whole and cut anywhere, replay address by address; changed ones do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.allocator import Completion, SnapshotReplay, parse_config, replay_snapshot, snapshot_replay
from memprof.trace.snapshot import Action, Snapshot, SnapshotEvent
from tests.lanes import examples
from tests.unit.allocator.recorder import Recorder
from tests.unit.allocator.requests import MIB, SIZES, TOTAL

SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max-split": "max_split_size_mb:40",
    "divisions": "roundup_power2_divisions:[1:2,16:8,>:4]",
    "large-segment": "large_segment_size_mb:34",
    "expandable-max-split": "expandable_segments:True,max_split_size_mb:40,large_segment_size_mb:12",
}


def run(text: str, seed: int, steps: int = 120) -> Recorder:
    """A random program on two streams, with work on a third, on a GPU that is too small for it."""
    r = random.Random(seed)
    recorder = Recorder(parse_config(text), TOTAL, r.choice(list(Completion)))
    live = []
    for _ in range(steps):
        choice = r.random()
        if choice < 0.55:
            block = recorder.malloc(r.choice(SIZES) + r.choice((0, 0, 1, 777)), r.choice((0, 0, 0, 5)))
            if block is not None:
                live.append(block)
        elif choice < 0.95 and live:
            block = live.pop(r.randrange(len(live)))
            if r.random() < 0.1:
                recorder.allocator.record_stream(block, 9)
            recorder.free(block)
        elif choice > 0.97:
            recorder.allocator.empty_cache()
    return recorder


def one(snapshot: Snapshot) -> SnapshotReplay:
    (found,) = replay_snapshot(snapshot, TOTAL)
    return found


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS.keys())
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 32))
@example(seed=3)
def test_whole_recording(text, seed):
    found = one(run(text, seed).snapshot())
    # A recording can be read in more than one way where memory goes back: there, and only there, it may not come out.
    assert found.exact or "what gave memory back" in found.first_difference.reason, found
    if found.exact:
        assert found.first_difference is None
        assert found.identical_addresses == found.allocations > 0


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS.keys())
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 32), part=st.floats(0, 1))
@example(seed=3, part=0.5)
@example(seed=4, part=0.8)
@example(seed=26974736, part=0.0)  # with max-split: everything is free at its end
@example(seed=265800, part=0.0)  # a refusal alone, without the frees that it has waited for
@example(seed=74840, part=0.1)  # a refusal after a free that it has waited for
def test_recording_that_begins_anywhere(text, seed, part):
    recorder = run(text, seed)
    # One event at least: without any, and with no memory left at the end, there is nothing to replay.
    found = one(recorder.snapshot(last=max(int(part * len(recorder.events)), 1)))
    assert found.exact or found.first_difference.reason, found


def test_the_first_reading_is_the_right_one(monkeypatch):
    """Where memory goes back a recording can be read in more than one way: of these, no other needs to be tried."""
    monkeypatch.setattr(snapshot_replay, "MAX_REPLAYS", 1)
    for text in SETTINGS.values():
        for seed in range(10):
            recorder = run(text, seed)
            assert one(recorder.snapshot()).exact, (text, seed)
            assert one(recorder.snapshot(last=len(recorder.events) // 2)).exact, (text, seed)


def test_recordings_cover_what_can_happen():
    seen = {event.action for seed in range(10) for event in run("", seed).events}
    seen |= {event.action for seed in range(10) for event in run("expandable_segments:True", seed).events}
    assert seen == set(Action) - {Action.SNAPSHOT, Action.ANNOTATE}


def _replaced(snapshot: Snapshot, index: int, **changes: object) -> Snapshot:
    trace = list(snapshot.traces[0])
    trace[index] = trace[index]._replace(**changes)
    return Snapshot(snapshot.segments, [trace], snapshot.settings)


def _small_recording() -> Snapshot:
    recorder = Recorder(parse_config(""), TOTAL)
    first = recorder.malloc(30 * MIB)
    second = recorder.malloc(40 * MIB)
    recorder.free(first)
    recorder.free(second)
    recorder.malloc(25 * MIB)
    recorder.malloc(512)
    return recorder.snapshot()


@pytest.mark.parametrize(
    ("rule", "value"),
    [("SPLIT_SLACK", 2 * MIB), ("SPLIT_SLACK", 0), ("SMALL_SIZE", MIB // 2), ("MIN_BLOCK", 4096)],
)
def test_a_recording_made_by_other_rules_is_found(monkeypatch, rule, value):
    """The allocator that records has one rule changed; what it records is whole, and still does not come out."""
    with monkeypatch.context() as changed:
        changed.setattr(f"memprof.allocator.caching.{rule}", value)
        snapshots = [run("", seed).snapshot() for seed in range(12)]
    found = [one(snapshot) for snapshot in snapshots]
    assert sum(recorded.exact for recorded in found) <= 6
    different = [recorded for recorded in found if not recorded.exact]
    assert all(recorded.first_difference.problem != "the beginning cannot be rebuilt" for recorded in different)
    assert all(recorded.identical_addresses <= recorded.allocations for recorded in found)


def test_another_size_changes_the_final_layout():
    snapshot = _small_recording()
    last = max(i for i, event in enumerate(snapshot.traces[0]) if event.action is Action.ALLOC)
    found = one(_replaced(snapshot, last, size=1024))
    assert found.identical_addresses == found.allocations == 4
    assert not found.final_layout_identical and not found.exact
    assert found.first_difference.event == len(snapshot.traces[0])
    assert found.first_difference.problem == "the final layout is another one"


def test_a_segment_that_was_not_needed_is_found():
    snapshot = _small_recording()
    trace = list(snapshot.traces[0])
    at = max(i for i, event in enumerate(trace) if event.action is Action.SEGMENT_ALLOC)
    trace.insert(at, trace[at]._replace(address=trace[at].address + 64 * MIB))
    found = one(Snapshot(snapshot.segments, [trace], snapshot.settings))
    assert not found.exact and found.identical_addresses == 0
    assert found.first_difference.problem == "the beginning cannot be rebuilt"
    assert "takes a segment at" in found.first_difference.reason


def test_events_that_are_missing_are_the_reason():
    snapshot = _small_recording()
    kept = [event for event in snapshot.traces[0] if event.action is not Action.FREE_COMPLETED]
    found = one(Snapshot(snapshot.segments, [kept], snapshot.settings))
    assert not found.exact
    assert "its free never completes" in found.first_difference.reason


def test_state_without_events():
    snapshot = _small_recording()
    found = one(Snapshot(snapshot.segments, [[]], snapshot.settings))
    assert found.exact and found.allocations == 0 and len(found.start.live) == 2


def test_nothing_at_all():
    assert replay_snapshot(Snapshot()) == []


def test_devices_apart():
    snapshot = _small_recording()
    other = [segment._replace(device=2) for segment in snapshot.segments]
    trace = snapshot.traces[0]
    both = Snapshot(snapshot.segments + other, [trace, [], trace], snapshot.settings)
    found = replay_snapshot(both, TOTAL)
    assert [recorded.device for recorded in found] == [0, 2]
    assert all(recorded.exact for recorded in found)


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 1 << 32), text=st.sampled_from(sorted(SETTINGS.values())), data=st.data())
def test_nonsense_is_never_a_traceback(seed, text, data):
    snapshot = run(text, seed, steps=40).snapshot()
    trace = snapshot.traces[0]
    for _ in range(data.draw(st.integers(1, 4))):
        if not trace:
            break
        at = data.draw(st.integers(0, len(trace) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "swap", "address", "size", "action"]))
        event: SnapshotEvent = trace[at]
        if change == "drop":
            del trace[at]
        elif change == "double":
            trace.insert(at, event)
        elif change == "swap":
            trace[at], trace[-1] = trace[-1], trace[at]
        elif change == "address":
            trace[at] = event._replace(address=data.draw(st.sampled_from(trace)).address)
        elif change == "size":
            trace[at] = event._replace(size=data.draw(st.sampled_from(SIZES)))
        else:
            trace[at] = event._replace(action=data.draw(st.sampled_from(list(Action))))
    found = one(snapshot) if snapshot.segments or trace else None
    if found is not None and found.exact:
        assert found.first_difference is None


def test_a_segment_where_there_is_one():
    snapshot = run("max_split_size_mb:40", 2920, steps=40).snapshot()
    trace = snapshot.traces[0]
    taken = [at for at, event in enumerate(trace) if event.action is Action.SEGMENT_ALLOC]
    trace[taken[1]] = trace[taken[1]]._replace(address=trace[taken[0]].address)
    found = one(snapshot)
    assert found.first_difference is not None and not found.exact


# -- the state at the beginning, and what the file does not say --------------------------------------------------------


def replay_part(recorder: Recorder, last: int) -> SnapshotReplay:
    """Replay the last events of a recording, of which each gets the recorded address."""
    (found,) = replay_snapshot(recorder.snapshot(last), TOTAL)
    assert found.exact, found.first_difference
    return found


def test_a_free_that_has_not_completed_when_the_recording_ends():
    recorder = Recorder(parse_config(""), TOTAL)
    block, other = recorder.malloc(30 * MIB), recorder.malloc(40 * MIB)
    recorder.allocator.record_stream(block, 9)
    recorder.free(other)
    recorder.free(block)
    assert replay_part(recorder, len(recorder.events)).allocations == 2
    found = replay_part(recorder, 1)
    assert [(live.requested, live.size, live.pending) for live in found.start.live.values()] == [
        (30 * MIB, 30 * MIB, False)
    ]
    assert replay_part(recorder, 0).start.live[block.address].pending


@pytest.mark.parametrize(
    ("first", "later", "size", "num_ambiguous"),
    [
        (29 * MIB, (), 30 * MIB, 0),  # 1 MiB is not split off
        (29 * MIB - 512, (), 29 * MIB - 512, 1),  # more may have been, and nothing tells
        (29 * MIB - 512, (MIB + 1,), 29 * MIB - 512, 0),  # an allocation begins where the block ends
        (21 * MIB, (3 * MIB,), 21 * MIB, 0),
        (1000, (), 1024, 0),  # of the small pool nothing is kept
    ],
)
def test_the_size_of_a_block_that_is_freed_in_the_recording(first, later, size, num_ambiguous):
    recorder = Recorder(parse_config(""), TOTAL)
    if first > MIB:
        recorder.free(recorder.malloc(30 * MIB))
    block = recorder.malloc(first)
    begin = len(recorder.events)
    others = [recorder.malloc(num_bytes) for num_bytes in later]
    recorder.free(block)
    for other in others:
        recorder.free(other)
    found = replay_part(recorder, len(recorder.events) - begin)
    assert [live.size for live in found.start.live.values()] == [size]
    assert found.start.num_ambiguous == num_ambiguous


@pytest.mark.parametrize(("first", "size"), [(21 * MIB, 22 * MIB), (21 * MIB + 1, 22 * MIB), (20 * MIB, 20 * MIB)])
def test_an_allocation_behind_a_block_tells_what_it_kept(first, size):
    """Of a free block of 22 MiB up to 1 MiB is not split off: then the next allocation begins behind that."""
    recorder = Recorder(parse_config(""), TOTAL)
    recorder.free(recorder.malloc(40 * MIB))
    whole, behind = recorder.malloc(22 * MIB), recorder.malloc(5 * MIB)
    recorder.free(whole)
    block = recorder.malloc(first)
    recorder.free(behind)
    begin = len(recorder.events)
    later = recorder.malloc(3 * MIB)
    recorder.free(block)
    recorder.free(later)
    found = replay_part(recorder, len(recorder.events) - begin)
    assert [live.size for live in found.start.live.values()] == [size] and found.start.num_ambiguous == 0


@pytest.mark.parametrize(("first", "size"), [(70 * MIB, 80 * MIB), (64 * MIB, 80 * MIB), (62 * MIB, 62 * MIB)])
def test_a_block_keeps_its_whole_segment_from_max_split_size_on(first, size):
    recorder = Recorder(parse_config("max_split_size_mb:64"), TOTAL)
    recorder.free(recorder.malloc(80 * MIB))
    recorder.free(recorder.malloc(first))
    (found,) = replay_snapshot(recorder.snapshot(2), TOTAL)
    assert [live.size for live in found.start.live.values()] == [size]


def test_ranges_of_the_beginning():
    """A segment that is released, one that is taken, and mappings that grow, shrink and leave a hole."""
    recorder = Recorder(parse_config("expandable_segments:True"), TOTAL)
    low, middle, high = (recorder.malloc(20 * MIB) for _ in range(3))
    recorder.malloc(1000, 5)
    begin = len(recorder.events)
    recorder.free(middle)
    recorder.allocator.empty_cache()
    recorder.malloc(1000)
    assert recorder.allocator.counters.reserved_bytes == 44 * MIB
    found = replay_part(recorder, len(recorder.events) - begin)
    assert [
        (run.address - low.address, run.size, run.stream, run.is_small, run.expandable) for run in found.start.ranges
    ][:1] == [(0, 60 * MIB, 0, False, True)]
    assert sorted((run.size, run.stream, run.is_small) for run in found.start.ranges) == [
        (2 * MIB, 5, True), (60 * MIB, 0, False),
    ]  # fmt: skip
    recorder.malloc(20 * MIB)  # fills the hole again
    recorder.free(high)
    recorder.allocator.empty_cache()
    found = replay_part(recorder, 3)  # unmapped: its last event, behind the free
    assert max(run.size for run in found.start.ranges) == 60 * MIB


# -- what a difference says --------------------------------------------------------------------------------------------


def recording() -> Recorder:
    """Events: segment, 1,000 bytes, 2,000 bytes, the first freed (2 events); segment, 30 MiB."""
    recorder = Recorder(parse_config(""), TOTAL)
    first = recorder.malloc(1000)
    recorder.malloc(2000)
    recorder.free(first)
    recorder.malloc(30 * MIB)
    return recorder


def difference(recorder: Recorder, changes: dict[int, dict[str, object]], *inserted: SnapshotEvent) -> tuple[int, str]:
    """The first difference of a recording in which events are changed, behind `inserted` ones."""
    events = [event._replace(**changes.get(index, {})) for index, event in enumerate(recorder.events)]
    (found,) = replay_snapshot(Snapshot(recorder.allocator.segments(), [[*inserted, *events]], {}), TOTAL)
    assert found.first_difference is not None and not found.exact and found.first_difference.device == 0
    assert not found.final_layout_identical
    return found.first_difference.event, found.first_difference.problem


def test_a_block_at_another_address():
    recorder = recording()
    address = recorder.events[1].address
    moved = {index: {"address": address + 64 * 512} for index in (1, 3, 4)}
    mark = recorder.events[0]._replace(action=Action.ANNOTATE)
    problem = f"1000 bytes at {address + 64 * 512:#x}, the replay says {address:#x}"
    assert difference(recorder, moved) == (1, problem)
    assert difference(recorder, moved, mark, mark) == (3, problem)  # by their place in the file


def test_a_failed_allocation_for_which_there_is_memory():
    recorder = recording()
    recorder.free(recorder.malloc(1000))
    *before, request, _, _ = recorder.events
    refused = request._replace(action=Action.OOM, address=0)
    (found,) = replay_snapshot(Snapshot(recorder.allocator.segments(), [[*before, refused]], {}), TOTAL)
    assert found.first_difference is not None and found.first_difference.event == len(before)
    assert found.first_difference.problem == f"1000 bytes were refused, the replay finds {request.address:#x}"
    assert found.first_difference.reason == ""


def test_a_segment_that_the_replay_does_not_take():
    recorder = recording()
    final = [segment._replace(size=32 * MIB) for segment in recorder.allocator.segments() if not segment.is_small]
    final += [segment for segment in recorder.allocator.segments() if segment.is_small]
    events = list(recorder.events)
    events[5] = events[5]._replace(size=32 * MIB)
    (found,) = replay_snapshot(Snapshot(final, [events], {}), TOTAL)
    assert found.first_difference is not None and found.first_difference.event == 6
    assert found.first_difference.problem == f"a segment of {30 * MIB} bytes was not taken"
    assert (found.allocations, found.identical_addresses) == (3, 2)


def test_what_a_replay_has_found_out():
    recorder = recording()
    recorder.allocator.empty_cache()
    recorder.free(recorder.malloc(60 * MIB))
    recorder.allocator.empty_cache()
    recorder.malloc(20 * MIB + 1)
    mark = recorder.events[0]._replace(action=Action.SNAPSHOT)
    (found,) = replay_snapshot(Snapshot(recorder.allocator.segments(), [[mark, *recorder.events]], {}), TOTAL)
    assert found.exact and found.device == 0 and found.allocations == found.identical_addresses == 5
    assert list(found.block_sizes) == [1024, 2048, 30 * MIB, 60 * MIB, 20 * MIB + 512]
    # The cache was emptied before the segment of 60 MiB was released: event 11 behind the mark.
    assert found.flushes == (12,) and recorder.events[11].action is Action.SEGMENT_FREE


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_a_file_without_settings_tells_expandable_segments_by_its_mappings(text):
    recorder = Recorder(parse_config(text), TOTAL)
    recorder.free(recorder.malloc(30 * MIB))
    recorder.malloc(70 * MIB)
    for events in (recorder.events, []):  # of the final segments alone, too
        (found,) = replay_snapshot(Snapshot(recorder.allocator.segments(), [list(events)], {}), TOTAL)
        assert found.exact


@pytest.mark.parametrize(("text", "reason"), [("", ""), ("expandable_segments:True", "the address space")])
def test_why_the_file_does_not_say_enough(text, reason):
    """The beginning of an expandable segment is not recorded: it may have been reserved below."""
    recorder = Recorder(parse_config(text), TOTAL)
    recorder.malloc(30 * MIB)
    begin = len(recorder.events)
    recorder.free(recorder.malloc(1000))
    events = recorder.events[begin:]
    moved = [event._replace(address=event.address + 512) if event.size == 1000 else event for event in events]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": text}
    (found,) = replay_snapshot(Snapshot(recorder.allocator.segments(), [moved], settings), TOTAL)
    assert found.first_difference is not None and found.first_difference.reason.startswith(reason)
    assert bool(found.first_difference.reason) == bool(reason)


@pytest.mark.parametrize("names_pool", [True, False])
def test_private_pools_are_told_by_the_events_or_by_their_segments(names_pool):
    """Before 2.9 events have no pool: it is that of the final segment around them."""
    recorder = Recorder(parse_config(""), TOTAL)
    recorder.allocator.create_pool((1, 0))
    block = recorder.allocator.malloc(30 * MIB, 0, (1, 0))
    recorder.write(Action.ALLOC, block.address, 30 * MIB)
    recorder.free(block)
    recorder.malloc(30 * MIB)  # of another pool
    recorder.malloc(1000)
    pool = (1, 0) if names_pool else (0, 0)
    inside = range(block.address, block.address + 30 * MIB)
    events = [event._replace(pool_id=pool) if event.address in inside else event for event in recorder.events]
    (found,) = replay_snapshot(Snapshot(recorder.allocator.segments(), [events], {}), TOTAL)
    assert found.exact and found.identical_addresses == 3
