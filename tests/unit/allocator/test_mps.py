"""The MPS allocator: heaps, buffers, cache and limits, with sizes worked out by hand from MPSAllocator.h and .mm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.allocator.config import AllocatorConfig, config_from_environment
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.mps import MpsAllocator, compute_heap_size
from memprof.allocator.replay import GpuMemory
from memprof.errors import UsageError
from memprof.trace.snapshot import BlockState

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def make(total=None, high=1.7, low=1.4):
    config = AllocatorConfig(mps_high_watermark_ratio=high, mps_low_watermark_ratio=low)
    return MpsAllocator(total, config)


@pytest.mark.parametrize(
    ("size", "heap"),
    [
        (256, 8 * MIB), (MIB, 8 * MIB), (MIB + 256, 32 * MIB), (10 * MIB - 256, 32 * MIB), (10 * MIB, GIB),
        (512 * MIB - 256, GIB), (512 * MIB, 512 * MIB), (512 * MIB + 256, 514 * MIB),
    ],
)  # fmt: skip
def test_the_heap_for_a_buffer(size, heap):
    assert compute_heap_size(size) == heap


@pytest.mark.parametrize(("size", "heap"), [(MIB, 8), (10 * MIB - 256, 32), (10 * MIB, 10), (11 * MIB, 12)])
def test_under_pressure_a_large_buffer_has_a_heap_of_its_own(size, heap):
    assert compute_heap_size(size, has_pressure=True) == heap * MIB


def test_sizes_are_multiples_of_256_and_heaps_are_shared():
    allocator = make()
    buffers = [allocator.malloc(num_bytes) for num_bytes in (1, 256, 257, 40_000)]
    assert [buffer.size for buffer in buffers] == [256, 256, 512, 40_192]
    assert [buffer.address - buffers[0].address for buffer in buffers] == [0, 256, 512, 1024]
    assert (allocator.counters.allocated_bytes, allocator.counters.requested_bytes) == (41_216, 40_514)
    assert allocator.counters.reserved_bytes == 8 * MIB
    allocator.malloc(2 * MIB)
    assert allocator.counters.reserved_bytes == 40 * MIB
    for _ in range(8):
        allocator.malloc(MIB)  # seven beside the small ones, and one in a second heap
    assert allocator.counters.reserved_bytes == 48 * MIB


def test_a_freed_buffer_keeps_its_size_for_the_next_request():
    allocator = make()
    allocator.free(allocator.malloc(40 * MIB))
    again = allocator.malloc(8 * MIB)  # at most 32 MiB larger: taken as it is
    assert (again.size, allocator.counters.allocated_bytes) == (40 * MIB, 40 * MIB)


def test_statistics_have_peaks_and_all_that_was_ever_allocated():
    allocator = make()
    allocator.malloc(100)
    allocator.free(allocator.malloc(2 * MIB))
    found = allocator.stats()
    both, requested = 2 * MIB + 256, 2 * MIB + 100
    for name, values in {
        "allocation.all": (1, 2, 2), "allocated_bytes.all": (256, both, both),
        "requested_bytes.all": (100, requested, requested), "allocated_bytes.large_pool": (0, 2 * MIB, 2 * MIB),
    }.items():  # fmt: skip
        assert tuple(found[f"{name}.{what}"] for what in ("current", "peak", "allocated")) == values, name


def test_a_buffer_more_than_32_mib_too_large_is_not_taken():
    allocator = make()
    allocator.free(cached := allocator.malloc(40 * MIB + 256))
    other = allocator.malloc(8 * MIB)
    assert (other.size, allocator.counters.reserved_bytes) == (8 * MIB, GIB)
    assert other.address == cached.address + cached.size  # the heap has room beside the buffer, which stays


def test_a_full_heap_gives_the_space_of_a_cached_buffer():
    allocator = make()
    allocator.free(allocator.malloc(600 * MIB))
    kept = allocator.malloc(100 * MIB)
    assert (kept.size, allocator.counters.reserved_bytes) == (100 * MIB, 600 * MIB)
    assert kept.address == allocator.segments()[0].address


def test_empty_cache_releases_heaps_without_buffers():
    allocator = make()
    kept, freed = allocator.malloc(2 * MIB), allocator.malloc(600 * MIB)
    allocator.free(freed)
    assert allocator.counters.reserved_bytes == 632 * MIB
    allocator.empty_cache()
    assert allocator.counters.reserved_bytes == 32 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.counters.reserved_bytes == allocator.counters.allocated_bytes == 0
    assert allocator.segments() == []


def test_the_error_at_the_high_watermark_is_torchs():
    allocator = make(10 * GIB, high=0.5)  # 5 GiB, and the low watermark is above it
    allocator.malloc(4 * GIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(GIB + 1)
    # As in Comfy-Org/ComfyUI, issue 8984, with other sizes, and "private" before torch had shared pools alone.
    assert caught.value.problem == (
        "MPS backend out of memory (MPS allocated: 4.00 GiB, other allocations: 0 bytes, max allowed: 5.00 GiB). Tried "
        "to allocate 1.00 GiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for "
        "memory allocations (may cause system failure)."
    )
    assert allocator.malloc(GIB).size == GIB  # exactly the limit


def test_at_the_limit_the_cache_is_released_first():
    allocator = make(10 * GIB, high=0.5)
    for buffer in [allocator.malloc(2 * GIB), allocator.malloc(2 * GIB)]:
        allocator.free(buffer)
    assert allocator.malloc(4 * GIB).size == 4 * GIB
    assert (allocator.counters.reserved_bytes, allocator.statistics.num_alloc_retries) == (4 * GIB, 0)
    allocator.free(allocator.malloc(MIB))  # in the other pool, which only the last attempt releases
    assert allocator.malloc(GIB).size == GIB
    assert (allocator.counters.reserved_bytes, allocator.statistics.num_alloc_retries) == (5 * GIB, 1)


@pytest.mark.parametrize(("backend", "largest"), [("mps", 6 * GIB), ("cuda", None), ("hip", None)])
def test_only_metal_has_a_largest_buffer(backend, largest):
    assert GpuMemory(8 * GIB, 0, backend=backend).max_buffer_bytes == largest


@pytest.mark.parametrize(
    ("memory", "share", "largest"),
    [(8, 2 / 3, 4), (16, 2 / 3, 8), (32, 2 / 3, 16), (64, 3 / 4, 36), (96, 3 / 4, 54)],
)
def test_a_buffer_is_below_three_quarters_of_the_working_set(memory, share, largest):
    """As machines with so many GiB of memory print it."""
    allocator = make(int(memory * share * GIB), high=0.0)  # which no setting changes
    allocator.malloc(largest * GIB - 1)
    allocator.free(allocator.malloc(MIB))
    with pytest.raises(OutOfMemory, match=rf"^Invalid buffer size: {largest}\.00 GiB$") as error:
        allocator.malloc(largest * GIB)
    assert error.value.report.max_buffer_bytes == largest * GIB
    allocator.lift_limit()
    assert allocator.malloc(largest * GIB).size == largest * GIB


def test_a_ratio_of_zero_is_no_limit():
    allocator = make(GIB, high=0.0)
    assert sum(allocator.malloc(GIB // 2).size for _ in range(200)) == 100 * GIB


def test_above_the_low_watermark_old_buffers_are_released():
    allocator = make(4 * GIB, high=2.0, low=0.5)  # pressure from 2 GiB - 1 MiB on
    buffers = [allocator.malloc(700 * MIB) for _ in range(3)]
    for buffer in buffers:
        allocator.free(buffer)
    allocator.malloc(800 * MIB)  # larger than any cached buffer, and less than all of them
    # 2,100 MiB are 52 MiB above the watermark: the buffer that is free longest is enough, and all are equally old.
    assert allocator.counters.reserved_bytes == (1400 + 800) * MIB


def test_the_space_of_a_larger_buffer_ends_the_pressure():
    allocator = make(4 * GIB, high=2.0, low=0.25)  # pressure from 1 GiB - 1 MiB on
    for buffer in [allocator.malloc(700 * MIB) for _ in range(2)]:
        allocator.free(buffer)
    allocator.malloc(100 * MIB)  # where the first one was; the second one is not released
    assert allocator.counters.reserved_bytes == 1400 * MIB


def test_torchs_variables_set_the_ratios():
    config, origin = config_from_environment({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0"}, backend="mps")
    assert (config.mps_high_watermark_ratio, config.mps_low_watermark_ratio) == (0.0, 1.4)
    assert origin == "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
    assert config_from_environment({"PYTORCH_CUDA_ALLOC_CONF": "nonsense"}, backend="mps")[1] is None
    assert config_from_environment({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "9"})[1] is None  # nothing to CUDA


@pytest.mark.parametrize(("high", "low"), [("2.0", "2.0"), ("0.0", "0.0"), ("1.0", "1.0")])
def test_ratios_that_torch_takes(high, low):
    variables = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": high, "PYTORCH_MPS_LOW_WATERMARK_RATIO": low}
    config, _ = config_from_environment(variables, backend="mps")
    assert (config.mps_high_watermark_ratio, config.mps_low_watermark_ratio) == (float(high), float(low))


@pytest.mark.parametrize(("high", "low"), [("2.1", "1"), ("-1", "0"), ("1.0", "1.1"), ("x", "1")])
def test_ratios_that_torch_refuses(high, low):
    variables = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": high, "PYTORCH_MPS_LOW_WATERMARK_RATIO": low}
    with pytest.raises(UsageError, match="watermark_ratio is"):
        config_from_environment(variables, backend="mps")


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 9)), max_size=40))
def test_buffers_never_overlap_and_sum_to_what_is_counted(requests):
    allocator = make(GIB, high=2.0, low=0.1)
    live = []
    for num_bytes, choice in requests:
        if choice < 4 and live:
            allocator.free(live.pop(choice % len(live)))
        else:
            live.append(allocator.malloc(num_bytes))
        segments = allocator.segments()
        assert sum(segment.size for segment in segments) == allocator.counters.reserved_bytes
        used = [(b.address, b.size) for s in segments for b in s.blocks if b.state is BlockState.ALLOCATED]
        assert sorted(used) == sorted((block.address, block.size) for block in live)
        assert sum(size for _, size in used) == allocator.counters.allocated_bytes
        for segment in segments:  # blocks follow each other without gaps
            ends = [block.address + block.size for block in segment.blocks]
            assert [block.address for block in segment.blocks[1:]] == ends[:-1]
