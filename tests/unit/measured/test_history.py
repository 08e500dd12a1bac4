"""The allocator's history with the profiler's operators laid over it."""

import pytest

from memprof.measured.cuda import find_incompleteness
from memprof.measured.history import CounterGap, CounterSample, History, find_largest_gap, read_history
from memprof.measured.operators import MemoryEvent, OperatorOrigin

MM, RELU = OperatorOrigin("aten.mm", 9_000_000), OperatorOrigin("aten.relu", 9_000_000)


def snapshot(*entries, segments=()):
    """Of (action, address, bytes, time in microseconds)."""
    names = ("action", "addr", "size", "time_us")
    return {"device_traces": [[dict(zip(names, one, strict=True), stream=0) for one in entries]], "segments": segments}


def seen(time_ns, address, num_bytes, place=MM):
    return MemoryEvent(time_ns, "cuda:0", address, num_bytes, place)


def test_operators_are_those_of_the_same_address_nearest_in_time():
    """The first and the third life were made outside operators."""
    times = (10, 1000, 2000, 3000)
    entries = [one for at in times for one in (("alloc", 1, 100, at), ("free_requested", 1, 100, at + 5))]
    history = read_history(snapshot(*entries), 0, [seen(1_000_400, 1, 512), seen(3_000_400, 1, 512, RELU)])
    assert [life.origin.op for life in history.allocations] == ["", "aten.mm", "", "aten.relu"]


def test_the_clocks_may_differ():
    entries = ("alloc", 1, 100, 10), ("alloc", 2, 100, 20), ("alloc", 3, 100, 30)
    history = read_history(snapshot(*entries), 0, [seen(110_000, 1, 512), seen(130_000, 3, 512)])
    assert [life.time_ns for life in history.allocations] == [110_000, 120_000, 130_000]


def test_the_allocators_order_is_kept_within_a_microsecond():
    entries = ("alloc", 1, 100, 7), ("free_requested", 1, 100, 7), ("alloc", 1, 50, 7)
    history = read_history(snapshot(*entries), 0, [])
    assert [(life.time_ns, life.freed_ns) for life in history.allocations] == [(7000, 7001), (7002, None)]
    assert history.requested_bytes == [(7000, 100), (7001, 0), (7002, 50)]


def test_a_life_ends_when_its_address_is_handed_out_again():
    history = read_history(snapshot(("alloc", 1, 100, 1), ("alloc", 1, 50, 2)), 0, [])
    assert [life.freed_ns for life in history.allocations] == [2000, None]
    assert history.requested_bytes[-1] == (2000, 50)


def test_what_the_profiler_alone_saw_is_counted():
    assert read_history(snapshot(("alloc", 1, 100, 1)), 0, [seen(1000, 1, 512), seen(2000, 2, 512)]).num_unmatched == 1


def test_pools_are_those_of_segments_where_entries_do_not_say():
    segments = [
        {"device": 0, "address": 100, "total_size": 50, "segment_pool_id": (0, 1), "blocks": []},
        {"device": 0, "address": 200, "total_size": 50, "segment_pool_id": (0, 0), "blocks": []},
    ]
    entries = [("alloc", address, 8, address) for address in (99, 100, 149, 150, 200)]
    history = read_history(snapshot(*entries, segments=segments), 0, [])
    assert [life.pool for life in history.allocations] == [(0, 0), (0, 1), (0, 1), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("counted", "difference"), [(100, None), (150, None), (101, (101, 100)), (130, (130, 150)), (0, (0, 100))]
)
def test_counters_may_say_what_was_held_at_any_time_while_they_were_read(counted, difference):
    second = 1_000_000
    history = read_history(snapshot(("alloc", 1, 100, second), ("alloc", 2, 50, 2 * second)), 0, [])
    found = find_largest_gap(history, [CounterSample(1_900_000_000, 2_100_000_000, counted + 7)], 7)
    assert (found and found[1:]) == difference


def test_the_largest_difference_is_told():
    history = read_history(snapshot(("alloc", 1, 100, 1000)), 0, [])
    readings = [
        CounterSample(at, at, counted) for at, counted in ((20_000_000, 90), (30_000_000, 130), (40_000_000, 100))
    ]
    assert find_largest_gap(history, readings, 0) == (30_000_000, 130, 100)


@pytest.mark.parametrize(
    ("history", "difference", "missing", "says"),
    [
        (History("cuda:0", num_entries=9), None, 0, None),
        (History("cuda:0", num_entries=10), None, 0, "10 entries"),
        (History("cuda:0"), CounterGap(5, 1 << 20, 0), 0, "say 1.00 MiB, what was recorded adds up to 0 bytes"),
        (History("cuda:0"), None, 1, "differ by 1 byte"),
        (History("cuda:0", num_unmatched=1), None, 0, "1 allocations and frees that the profiler saw"),
    ],
)
def test_a_recording_that_is_not_whole_says_why(history, difference, missing, says):
    error = find_incompleteness(history, difference, missing, max_entries=10)
    assert (error is None) if says is None else (says in error.value and error.hint)


@pytest.mark.parametrize(("late_ns", "is_told"), [(1_999_999, False), (2_000_001, True)])
def test_clocks_may_be_two_milliseconds_apart(late_ns, is_told):
    history = read_history(snapshot(("alloc", 1, 100, 9_000)), 0, [])
    found = find_largest_gap(history, [CounterSample(9_000_000 - late_ns, 9_000_000 - late_ns, 100)], 0)
    assert (found is not None) is is_told
