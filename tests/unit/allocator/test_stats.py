"""torch.cuda.memory_stats() after a few requests, counter by counter, by hand."""

from __future__ import annotations

import pytest

from memprof.allocator import CachingAllocator, Completion, parse_config

MIB = 1 << 20
SMALL_REST, LARGE_REST = 2 * MIB - 1024, 17 * MIB  # what is split off the two blocks below


def run() -> CachingAllocator:
    """1,000 bytes and 3 MiB, freed; 30 MiB and 700 bytes, live."""
    memory = CachingAllocator(1000 * MIB)
    small, large = memory.malloc(1000), memory.malloc(3 * MIB)
    memory.free(small)
    memory.malloc(30 * MIB)
    memory.free(large)
    memory.malloc(700)
    return memory


def values(memory: CachingAllocator, name: str) -> tuple[int, ...]:
    stats = memory.stats()
    return tuple(stats[f"{name}.{part}"] for part in ("current", "peak", "allocated", "freed"))


@pytest.mark.parametrize(
    ("name", "small", "large", "both"),
    [
        # current, peak, all that were allocated, all that were freed
        ("allocation", (1, 1, 2, 1), (1, 2, 2, 1), (2, 2, 4, 2)),
        ("active", (1, 1, 2, 1), (1, 2, 2, 1), (2, 2, 4, 2)),
        ("segment", (1, 1, 1, 0), (2, 2, 2, 0), (3, 3, 3, 0)),
        ("inactive_split", (1, 1, 2, 1), (0, 1, 1, 1), (1, 2, 3, 2)),
        ("allocated_bytes", (1024, 1024, 2048, 1024), (30 * MIB, 33 * MIB, 33 * MIB, 3 * MIB),
         (30 * MIB + 1024, 33 * MIB, 33 * MIB + 2048, 3 * MIB + 1024)),
        ("active_bytes", (1024, 1024, 2048, 1024), (30 * MIB, 33 * MIB, 33 * MIB, 3 * MIB),
         (30 * MIB + 1024, 33 * MIB, 33 * MIB + 2048, 3 * MIB + 1024)),
        ("requested_bytes", (700, 1000, 1700, 1000), (30 * MIB, 33 * MIB, 33 * MIB, 3 * MIB),
         (30 * MIB + 700, 33 * MIB, 33 * MIB + 1700, 3 * MIB + 1000)),
        ("reserved_bytes", (2 * MIB, 2 * MIB, 2 * MIB, 0), (50 * MIB, 50 * MIB, 50 * MIB, 0),
         (52 * MIB, 52 * MIB, 52 * MIB, 0)),
        ("inactive_split_bytes", (SMALL_REST, SMALL_REST, 2 * SMALL_REST, SMALL_REST),
         (0, LARGE_REST, LARGE_REST, LARGE_REST),
         (SMALL_REST, SMALL_REST + LARGE_REST, 2 * SMALL_REST + LARGE_REST, SMALL_REST + LARGE_REST)),
    ],
)  # fmt: skip
def test_counters_of_each_pool(name, small, large, both):
    memory = run()
    for pool, expected in (("small_pool", small), ("large_pool", large), ("all", both)):
        assert values(memory, f"{name}.{pool}") == expected


def test_the_other_counters():
    memory = run()
    names = [name for name in memory.stats() if "." not in name]
    assert {name: memory.stats()[name] for name in names} == {
        "max_split_size": -1, "num_alloc_retries": 0, "num_device_alloc": 3, "num_device_free": 0,
        "num_oom_rejections": 0, "num_ooms": 0, "num_sync_all_streams": 0,
    }  # fmt: skip
    assert list(memory.stats()) == sorted(memory.stats()) and len(memory.stats()) == 9 * 3 * 4 + 2 * 4 + 7
    memory.empty_cache()
    stats = memory.stats()
    assert (stats["num_device_free"], stats["num_sync_all_streams"]) == (1, 1)
    assert values(memory, "segment.large_pool") == (1, 2, 2, 1)
    assert values(memory, "reserved_bytes.all") == (32 * MIB, 52 * MIB, 52 * MIB, 20 * MIB)


def test_peaks_begin_at_what_is_there():
    memory = run()
    memory.statistics.reset_peak()
    for name in ("allocation", "active", "segment", "inactive_split", "allocated_bytes", "active_bytes",
                 "requested_bytes", "reserved_bytes", "inactive_split_bytes"):  # fmt: skip
        for pool in ("small_pool", "large_pool", "all"):
            current, peak, *_ = values(memory, f"{name}.{pool}")
            assert current == peak


def test_parts_of_a_split_block():
    """Of a segment of 20 MiB: 3 are split off 20, 5 off the rest; the last 12 are used whole, and all is freed."""
    memory = CachingAllocator(None)
    first, second = memory.malloc(3 * MIB), memory.malloc(5 * MIB)
    assert values(memory, "inactive_split_bytes.all") == (12 * MIB, 17 * MIB, 17 * MIB, 5 * MIB)
    last = memory.malloc(12 * MIB - 512)  # 512 bytes are too few to split off
    assert last.size == 12 * MIB
    assert values(memory, "inactive_split.all") == (0, 1, 1, 1)
    memory.free(second)
    assert values(memory, "inactive_split_bytes.all") == (5 * MIB, 17 * MIB, 22 * MIB, 17 * MIB)
    memory.free(first)  # one part of 8 MiB
    assert values(memory, "inactive_split.all") == (1, 1, 2, 1)
    assert values(memory, "inactive_split_bytes.all") == (8 * MIB, 17 * MIB, 25 * MIB, 17 * MIB)
    memory.free(last)
    assert values(memory, "inactive_split.all") == (0, 1, 2, 2)
    assert values(memory, "inactive_split_bytes.large_pool") == (0, 17 * MIB, 25 * MIB, 25 * MIB)


def test_blocks_that_wait_for_a_stream_are_active():
    memory = CachingAllocator(None, completion=Completion.AT_SYNC)
    first = memory.malloc(30 * MIB)
    memory.record_stream(first, 3)
    memory.free(first)
    assert values(memory, "active_bytes.all") == (30 * MIB, 30 * MIB, 30 * MIB, 0)
    assert values(memory, "allocated_bytes.all") == (0, 30 * MIB, 30 * MIB, 30 * MIB)
    assert values(memory, "requested_bytes.large_pool") == (30 * MIB, 30 * MIB, 30 * MIB, 0)
    memory.malloc(20 * MIB)
    memory.malloc(1000)
    for pool in ("large_pool", "all"):
        small = (1, 1024) if pool == "all" else (0, 0)
        assert values(memory, f"active.{pool}") == (2 + small[0], 2 + small[0], 2 + small[0], 0)
        assert values(memory, f"active_bytes.{pool}")[:2] == (50 * MIB + small[1], 50 * MIB + small[1])
        assert values(memory, f"allocated_bytes.{pool}")[:2] == (20 * MIB + small[1], 30 * MIB)
    assert values(memory, "active.small_pool") == (1, 1, 1, 0)
    memory.statistics.reset_peak()
    assert values(memory, "active_bytes.all")[:2] == (50 * MIB + 1024, 50 * MIB + 1024)
    memory.synchronize()
    assert values(memory, "active_bytes.all")[:2] == (20 * MIB + 1024, 50 * MIB + 1024)
    assert values(memory, "requested_bytes.all")[:2] == (20 * MIB + 1000, 50 * MIB + 1000)
    assert memory.stats()["num_sync_all_streams"] == 1


def test_oversize_blocks_and_segments():
    """From max_split_size on, just below it none."""
    memory = CachingAllocator(None, parse_config("max_split_size_mb:64"))
    memory.malloc(62 * MIB)
    assert values(memory, "oversize_allocations") == values(memory, "oversize_segments") == (0, 0, 0, 0)
    blocks = [memory.malloc(size * MIB) for size in (64, 100)]
    memory.free(blocks[0])
    memory.malloc(64 * MIB)
    memory.free(blocks[1])
    assert values(memory, "oversize_allocations") == (1, 2, 3, 2)
    assert values(memory, "oversize_segments") == (2, 2, 2, 0)
    memory.empty_cache()
    assert values(memory, "oversize_segments") == (1, 2, 2, 1) and memory.stats()["max_split_size"] == 64 * MIB
    memory.statistics.reset_peak()
    assert values(memory, "oversize_allocations")[1] == values(memory, "oversize_segments")[1] == 1


def test_an_oversize_block_that_waits_is_counted_until_it_is_freed():
    memory = CachingAllocator(None, parse_config("max_split_size_mb:64"), completion=Completion.AT_SYNC)
    block = memory.malloc(100 * MIB)
    memory.record_stream(block, 3)
    memory.free(block)
    memory.synchronize()
    assert values(memory, "oversize_allocations") == (0, 1, 1, 1)


def test_without_counts_only_reserved_bytes_are_counted():
    memory = CachingAllocator(None, counts=False)
    blocks = [memory.malloc(size) for size in (1000, 3 * MIB, 5 * MIB, 12 * MIB - 512)]
    for block in blocks:
        memory.free(block)
    counted = {name for name, value in memory.stats().items() if value}
    assert {name.partition(".")[0] for name in counted} == {
        "reserved_bytes",
        "segment",
        "num_device_alloc",
        "max_split_size",
    }
    assert values(memory, "reserved_bytes.all") == (22 * MIB, 22 * MIB, 22 * MIB, 0)


def test_a_block_as_text():
    memory = CachingAllocator(None, parse_config("expandable_segments:True"))
    block = memory.malloc(3 * MIB)
    assert repr(block) == f"Block({block.address:#x}, {3 * MIB}, active)"
    assert block.next is not None and repr(block.next).endswith(f"{17 * MIB}, free)")
    assert block.next.next is not None and repr(block.next.next).endswith("unmapped)")
