"""Timelines: what is held after each event, peaks and where they fall, the first error and what lies past it."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.allocator import GpuMemory, TraceReplay, parse_config
from memprof.allocator.replay import UNLIMITED_BYTES
from memprof.trace.events import GPU, HOST, Event, EventKind, Trace
from tests.lanes import examples
from tests.unit.allocator.replaying import replay, replay_trace
from tests.unit.allocator.requests import MIB, SETTINGS, SIZES, TOTAL
from tests.unit.allocator.traces import StreamScript
from tests.unit.traces import TraceBuilder

GPU_MODEL = GpuMemory(TOTAL, 10 * MIB)


def trace_of(*steps: tuple[str, int, int] | tuple[str, int]) -> Trace:
    """("+", storage, bytes) allocates on the GPU, ("h", storage, bytes) on the host, ("-", storage) frees."""
    b = TraceBuilder(None)
    for kind, ref, *more in steps:
        if kind == "-":
            b.free(ref)
        else:
            assert ref == b.alloc(more[0], device=GPU if kind == "+" else HOST)
    return b.trace


def test_timeline_of_a_trace():
    trace = trace_of(("+", 0, 30 * MIB), ("h", 1, 500), ("+", 2, 0), ("+", 3, 700), ("-", 0), ("-", 1), ("-", 2))
    trace.events.insert(1, Event(EventKind.PHASE, 0))
    timeline = replay_trace(trace)
    assert list(timeline.requested) == [30 * MIB] * 4 + [30 * MIB + 700] + [700] * 3
    assert list(timeline.allocated) == [30 * MIB] * 4 + [30 * MIB + 1024] + [1024] * 3
    assert list(timeline.reserved) == [30 * MIB] * 4 + [32 * MIB] * 4
    assert (timeline.peak_reserved.num_bytes, timeline.peak_reserved.event) == (32 * MIB, 4)
    assert timeline.first_oom is None
    assert [(segment.size, segment.allocated, segment.largest_free) for segment in timeline.segments] == [
        (30 * MIB, 0, 30 * MIB),
        (2 * MIB, 1024, 2 * MIB - 1024),
    ]
    assert timeline.stats["reserved_bytes.all.peak"] == 32 * MIB


def test_the_first_of_equal_peaks_counts():
    trace = trace_of(("+", 0, 30 * MIB), ("-", 0), ("+", 1, 30 * MIB))
    assert replay_trace(trace).peak_reserved.event == 0


def test_a_run_that_does_not_fit_is_gone_on_with():
    trace = trace_of(("+", 0, 60 * MIB), ("+", 1, 60 * MIB), ("-", 0), ("+", 2, 100 * MIB), ("+", 3, 3 * MIB))
    timeline = replay_trace(trace, usable_bytes=100 * MIB, total_bytes=128 * MIB)
    assert timeline.first_oom.event == 1
    assert timeline.first_oom.report.tried_bytes == 60 * MIB
    assert timeline.first_oom.message.startswith(
        "CUDA out of memory. Tried to allocate 60.00 MiB. GPU 0 has a total capacity of 128.00 MiB of which "
        "40.00 MiB is"
    )
    assert list(timeline.allocated) == [size * MIB for size in (60, 120, 60, 160, 163)]
    assert timeline.peak_reserved.num_bytes == 220 * MIB
    assert timeline.peak_reserved.event == 3
    assert timeline.retries == 1


def test_limits_of_settings_are_lifted_too():
    trace = trace_of(("+", 0, 60 * MIB), ("+", 1, 60 * MIB))
    settings = parse_config("per_process_memory_fraction:0.5,garbage_collection_threshold:0.5")
    timeline = replay_trace(trace, usable_bytes=200 * MIB, config=settings)
    assert timeline.first_oom.event == 1
    assert "100.00 MiB allowed" in timeline.first_oom.message
    assert timeline.peak_reserved.num_bytes == 120 * MIB


def test_address_space_is_no_limit_past_the_first_error():
    trace = trace_of(("+", 0, 20 * MIB), ("+", 1, 500 * MIB), ("+", 2, 90 * MIB))
    timeline = replay_trace(trace, usable_bytes=100 * MIB, config=parse_config("expandable_segments:True"))
    assert timeline.first_oom.event == 1
    assert max(timeline.allocated) == 610 * MIB
    assert timeline.peak_reserved.num_bytes == 620 * MIB


def test_retry_holds_less_after_than_within():
    trace = trace_of(("+", 0, 60 * MIB), ("-", 0), ("+", 1, 80 * MIB))
    timeline = replay_trace(trace, usable_bytes=100 * MIB)
    assert timeline.first_oom is None and timeline.retries == 1
    assert list(timeline.reserved) == [60 * MIB, 60 * MIB, 80 * MIB]


def test_expandable_segments_need_less():
    steps = [("+", 0, 60 * MIB), ("+", 1, 2 * MIB), ("-", 0), ("+", 2, 50 * MIB), ("+", 3, 70 * MIB)]
    trace = trace_of(*steps)
    plain, expandable = (replay_trace(trace, config=parse_config(t)) for t in ("", "expandable_segments:True"))
    assert max(expandable.allocated) == max(plain.allocated)
    assert expandable.peak_reserved.num_bytes < plain.peak_reserved.num_bytes


def test_empty_trace():
    timeline = replay_trace(Trace())
    assert len(timeline.allocated) == 0 and timeline.peak_reserved.num_bytes == 0 and timeline.peak_reserved.event == -1


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:32"])
@given(sizes=st.lists(st.integers(1, 40 * MIB), max_size=25), order=st.randoms(use_true_random=False))
@example(sizes=[SIZES[index * 7 % len(SIZES)] % (40 * MIB) for index in range(25)], order=random.Random(3))
def test_columns_are_what_the_counters_say(text, sizes, order):
    requests = [(name, size) for name, size in enumerate(sizes)]
    for name, _ in list(requests):
        at = next(i for i, (other, size) in enumerate(requests) if other == name and size)
        if order.random() < 0.7:
            requests.insert(order.randint(at + 1, len(requests)), (name, 0))
    timeline = replay(requests, config=parse_config(text))
    assert len(timeline.allocated) == len(requests)
    columns = zip(timeline.requested, timeline.allocated, timeline.reserved, strict=True)
    assert all(requested <= allocated <= reserved for requested, allocated, reserved in columns)
    peak = timeline.peak_reserved
    assert peak.num_bytes == max(timeline.reserved, default=0)
    assert peak.event == (list(timeline.reserved).index(peak.num_bytes) if requests else -1)


def random_program(seed: int, steps: int = 150) -> Trace:
    """Mostly requests and frees; of the rest, as many kinds as the seed says."""
    r = random.Random(seed)
    script = StreamScript()
    rare = r.choice((0.0, 0.02, 0.1))
    streams = r.choice(((0,), (0, 0, 7), (0, 7, 1 << 47)))
    for _ in range(steps):
        choice = r.random()
        if choice < rare:
            _add_rare_event(script, r)
        elif choice < 0.58 or not script.home:
            device = r.choice((GPU, GPU, GPU, GPU, "cuda:1", "cpu"))
            index = script.alloc(
                r.choice((0, *SIZES)) + r.choice((0, 0, 1, 777)), device=device, stream=r.choice(streams)
            )
            if r.random() < rare / 4:
                script.trace.refused.append(index)
        else:
            script.free(r.choice(list(script.home)))
    return script.trace


def _add_rare_event(script: StreamScript, r: random.Random) -> None:
    kind = r.choice(("empty", "phase", "use", "wait", "pool", "pool", "retire"))
    if kind == "empty":
        script.empty_cache()
    elif kind == "phase":
        script.add(EventKind.PHASE, 0)
    elif kind == "use" and script.home:
        script.use(r.choice(list(script.home)), r.choice((0, 7, 9)))
    elif kind == "wait":
        script.wait(r.choice((7, 9)), by_host=r.random() < 0.5)
    elif kind == "pool":
        script.add(EventKind.POOL, r.choice((0, 1, 2)))
    elif kind == "retire":
        script.add(EventKind.POOL, 0)
        script.add(EventKind.POOL_FREE, 1)


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS.keys())
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 1 << 32), limited=st.booleans())
@example(seed=1, limited=True)
@example(seed=2, limited=False)
def test_decisions_do_not_depend_on_what_is_counted(text, seed, limited):
    trace, outcomes = random_program(seed), []
    for counts in (True, False):
        replay = TraceReplay(trace, GPU_MODEL if limited else None, parse_config(text), counts=counts)
        replay.advance(writes=False)
        counters, oom = replay.allocator.counters, replay.timeline.first_oom
        places = [(ref, block.address, block.size) for ref, block in replay.live.items()]
        reserved = (counters.reserved_bytes, counters.reserved_bytes_peak)
        outcomes.append((places, reserved, replay.allocator.segments(), None if oom is None else oom.event))
    assert outcomes[0] == outcomes[1]


def test_no_limit_is_more_than_any_gpu_has_and_a_number_of_64_bits() -> None:
    assert 1 << 50 < UNLIMITED_BYTES < 1 << 63
