"""Questions while a run goes on: each replays what is new, and the answers are those of a whole replay."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.allocator import AllocatorConfig, GpuMemory, LiveAllocator, parse_config, replay_on_gpu
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.releases import LATEST
from tests.lanes import examples
from tests.unit.allocator.replaying import replay_trace
from tests.unit.allocator.traces import MIB
from tests.unit.traces import TraceBuilder

GPU = GpuMemory(1000 * MIB, 20 * MIB)


def test_follows_the_trace():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    assert memory.stats()["reserved_bytes.all.current"] == 0
    first = script.alloc(30 * MIB)
    script.alloc(700)
    assert memory.stats()["reserved_bytes.all.current"] == 32 * MIB
    script.free(first)
    script.empty_cache()
    script.alloc(3 * MIB)
    assert memory.stats() == memory.stats() == replay_trace(script.trace).stats


def test_peaks_begin_anew():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    script.free(script.alloc(30 * MIB))
    script.alloc(3 * MIB)
    memory.reset_peak()
    stats = memory.stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.large_pool.peak"] == 3 * MIB
    assert stats["reserved_bytes.all.peak"] == 30 * MIB and stats["allocation.all.peak"] == 1
    script.alloc(2 * MIB)
    assert memory.stats()["allocated_bytes.all.peak"] == 5 * MIB


def test_settings_hold_for_what_comes_after_them():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    script.free(script.alloc(30 * MIB))
    script.alloc(3 * MIB)  # splits the cached segment
    memory.change_settings(LiveAllocator(script.trace, GPU, parse_config("max_split_size_mb:20")))
    script.free(script.alloc(50 * MIB))
    script.alloc(3 * MIB)  # neither in the 27 MiB that are left of the first segment, nor in the 50 MiB: 20 MiB
    stats = memory.stats()
    assert stats["reserved_bytes.all.current"] == 100 * MIB and stats["allocated_bytes.all.current"] == 6 * MIB
    assert stats["allocated_bytes.all.peak"] == 53 * MIB
    assert stats["oversize_segments.current"] == 2


def test_accumulated_counters_begin_anew():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    kept = script.alloc(30 * MIB)
    script.free(script.alloc(30 * MIB))
    memory.reset_accumulated()
    stats = memory.stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == stats["num_device_alloc"] == 0
    assert stats["allocation.all.current"] == 1
    script.free(kept)
    script.alloc(50 * MIB)
    stats = memory.stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (1, 1)
    assert stats["num_device_alloc"] == 1


def test_counters_that_begin_anew_are_those_of_torch():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    script.free(script.alloc(600 * MIB))
    script.alloc(700 * MIB)  # after the cache was released
    script.alloc(500 * MIB)  # more than there is
    names = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms", "num_sync_all_streams")
    stats = memory.stats()
    assert [stats[name] for name in names] == [2, 3, 1, 1, 2]
    before = {name: value for name, value in stats.items() if name.endswith((".current", ".peak"))}
    memory.reset_accumulated()
    after = memory.stats()
    assert [after[name] for name in names] == [0] * 5 and before.items() <= after.items()
    assert not any(value for name, value in after.items() if name.endswith((".allocated", ".freed")))


def test_small_requests_and_large_ones_until_the_gpu_is_full():
    """Each small block may need a segment of 2 MiB; what is asked is answered as soon as there may be no room."""
    for sizes, count in (([512 * 1024], 1960), ([700 * 1024], 980), ([11 * MIB], 81), ([MIB + 1], 49 * 19)):
        script = TraceBuilder()
        memory = LiveAllocator(script.trace, GPU)
        answered = 0
        while ask(script, memory, sizes[0]) is not None:
            answered += 1
        assert answered == count


def test_goes_on_beyond_the_gpu():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    for _ in range(3):
        script.alloc(500 * MIB)
    stats = memory.stats()
    assert stats["reserved_bytes.all.current"] == 1500 * MIB and stats["num_ooms"] == 1


# -- a GPU that refuses -----------------------------------------------------------------------------------------------


def ask(script: TraceBuilder, memory: LiveAllocator, num_bytes: int) -> int | None:
    """The storage, or None if it was refused: as the recorder does it."""
    ref = script.alloc(num_bytes)
    if memory.find_oom_message() is None:
        return ref
    script.trace.refused.append(ref)
    script.free(ref)
    return None


def test_what_does_not_fit_is_refused_with_the_words_of_torch():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    assert ask(script, memory, 700 * MIB) is not None
    script.alloc(500 * MIB)
    message = memory.find_oom_message()
    assert message is not None and message.startswith("CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a")
    assert "Including non-PyTorch memory, this process has 720.00 MiB memory in use." in message
    assert "700.00 MiB is allocated by PyTorch" in message
    assert memory.stats()["allocated_bytes.all.current"] == 700 * MIB


def test_what_is_freed_can_be_had_again():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    large = ask(script, memory, 700 * MIB)
    assert ask(script, memory, 500 * MIB) is None
    script.free(large)
    assert ask(script, memory, 800 * MIB) is not None  # the cache of 700 MiB is released for it
    assert memory.stats()["reserved_bytes.all.current"] == 800 * MIB
    run = replay_on_gpu(script.trace, GPU)
    assert run.fits and run.retries > 0


def test_what_was_refused_is_no_need_and_its_retry_saved_nothing():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    script.free(ask(script, memory, 300 * MIB))
    assert ask(script, memory, 5000 * MIB) is None  # the cache of 300 MiB is released for it, in vain
    assert ask(script, memory, 700 * MIB) is not None
    run = replay_on_gpu(script.trace, GPU)
    assert run.fits and run.retries == 0
    assert run.required_reserved_bytes == 1000 * MIB  # 300 MiB and 700 MiB, where nothing is released
    larger = replay_on_gpu(script.trace, GpuMemory(10 << 30, 20 * MIB))
    assert larger.fits and larger.required_reserved_bytes == run.required_reserved_bytes


def test_a_run_that_ends_at_a_refusal_does_not_fit():
    script = TraceBuilder()
    memory = LiveAllocator(script.trace, GPU)
    ask(script, memory, 700 * MIB)
    assert ask(script, memory, 600 * MIB) is None
    assert ask(script, memory, 500 * MIB) is None
    script.trace.refused.pop()  # this one the program did not survive
    run = replay_on_gpu(script.trace, GPU)
    assert not run.fits and run.first_oom.report.requested_bytes == 500 * MIB


@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=st.lists(st.sampled_from([700, 1 << 20, 3 * MIB, 11 * MIB, 90 * MIB, 333 * MIB]), max_size=60),
    drop=st.lists(st.integers(0, 200), max_size=60),
    conf=st.sampled_from(
        ["", "expandable_segments:True", "roundup_power2_divisions:1", "per_process_memory_fraction:0.5"]
    ),
)
@example(sizes=[333 * MIB, 3 * MIB] * 8, drop=[1, 4, 7] * 5, conf="")
@example(sizes=[90 * MIB, 700, 11 * MIB, 1 << 20] * 15, drop=[], conf="per_process_memory_fraction:0.5")
@example(sizes=[333 * MIB, 11 * MIB, 3 * MIB] * 5, drop=[2], conf="expandable_segments:True")
def test_refused_exactly_where_the_allocator_refuses(sizes, drop, conf):
    """The bound by which most requests are passed without a replay never hides one."""
    config = parse_config(conf, LATEST, origin="test") if conf else AllocatorConfig()
    script, live = TraceBuilder(), []
    memory = LiveAllocator(script.trace, GPU, config)
    allocator = CachingAllocator(GPU.total_bytes, config, driver=SimulatedDriver(GPU.total_bytes, 20 * MIB))
    blocks = {}
    for size, victim in itertools.zip_longest(sizes, drop[: len(sizes)]):
        ref = ask(script, memory, size)
        try:
            block = allocator.malloc(size)
        except OutOfMemory:
            block = None
        assert (ref is None) == (block is None)
        if ref is not None:
            live.append(ref)
            blocks[ref] = block
        if victim is not None and live and victim % 3:
            gone = live.pop(victim % len(live))
            script.free(gone)
            allocator.free(blocks.pop(gone))
    now = memory.stats()
    assert now["reserved_bytes.all.current"] == allocator.statistics.all.reserved_bytes
    assert now["allocated_bytes.all.current"] == allocator.statistics.all.allocated_bytes
