"""Questions while a run goes on: each replays what is new, and the answers are those of a whole replay."""

from __future__ import annotations

from memprof.allocator import Card, LiveAllocator, replay_trace
from tests.unit.allocator.traces import MIB, Script

CARD = Card(1000 * MIB, 20 * MIB)


def test_follows_the_trace():
    script = Script()
    memory = LiveAllocator(script.trace, CARD)
    assert memory.stats()["reserved_bytes.all.current"] == 0
    first = script.new(30 * MIB)
    script.new(700)
    assert memory.stats()["reserved_bytes.all.current"] == 32 * MIB
    script.free(first)
    script.empty_cache()
    script.new(3 * MIB)
    assert memory.stats() == memory.stats() == replay_trace(script.trace).stats


def test_peaks_begin_anew():
    script = Script()
    memory = LiveAllocator(script.trace, CARD)
    script.free(script.new(30 * MIB))
    script.new(3 * MIB)
    memory.reset_peak()
    stats = memory.stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.large_pool.peak"] == 3 * MIB
    assert stats["reserved_bytes.all.peak"] == 30 * MIB and stats["allocation.all.peak"] == 1
    script.new(2 * MIB)
    assert memory.stats()["allocated_bytes.all.peak"] == 5 * MIB


def test_accumulated_counters_begin_anew():
    script = Script()
    memory = LiveAllocator(script.trace, CARD)
    kept = script.new(30 * MIB)
    script.free(script.new(30 * MIB))
    memory.reset_accumulated()
    stats = memory.stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == stats["num_device_alloc"] == 0
    assert stats["allocation.all.current"] == 1
    script.free(kept)
    script.new(50 * MIB)
    stats = memory.stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (1, 1)
    assert stats["num_device_alloc"] == 1


def test_goes_on_beyond_the_card():
    script = Script()
    memory = LiveAllocator(script.trace, CARD)
    for _ in range(3):
        script.new(500 * MIB)
    stats = memory.stats()
    assert stats["reserved_bytes.all.current"] == 1500 * MIB and stats["num_ooms"] == 1
