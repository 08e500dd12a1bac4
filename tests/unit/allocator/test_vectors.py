"""The allocator's decisions in single steps, expected by hand from its rules."""

from __future__ import annotations

import pytest

from memprof.allocator import CachingAllocator, Completion, OutOfMemory, parse_config, parse_release
from memprof.allocator.rounding import round_size, segment_size
from memprof.trace.snapshot import SnapshotSegment

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def allocator(settings: str = "", total: int | None = 80 * GIB, **options: object) -> CachingAllocator:
    return CachingAllocator(total, parse_config(settings), **options)


def sizes(segment: SnapshotSegment) -> list[tuple[int, bool]]:
    return [(block.size, block.state != "inactive") for block in segment.blocks]


@pytest.mark.parametrize(
    ("request_bytes", "rounded", "segment", "kept"),
    [
        (1, 512, 2 * MIB, 512),
        (512, 512, 2 * MIB, 512),
        (513, 1024, 2 * MIB, 1024),
        (MIB, MIB, 2 * MIB, MIB),
        (MIB + 1, 1_049_088, 20 * MIB, 1_049_088),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10_486_272, 12 * MIB, 10_486_272),
        (45 * MIB + 7, 47_186_432, 46 * MIB, 48_234_496),
    ],
)
def test_first_request(request_bytes, rounded, segment, kept):
    assert round_size(request_bytes) == rounded
    assert segment_size(rounded) == segment
    memory = allocator()
    block = memory.malloc(request_bytes)
    assert (block.size, block.requested) == (kept, request_bytes)
    assert memory.counters.reserved_bytes == segment
    assert memory.counters.allocated_bytes == kept
    expected = [(kept, True)] + ([(segment - kept, False)] if segment > kept else [])
    assert [sizes(found) for found in memory.segments()] == [expected]


def test_expandable_segment_grows_by_units():
    memory = allocator("expandable_segments:True")
    memory.malloc(3 * MIB)
    assert [sizes(found) for found in memory.segments()] == [[(3 * MIB, True), (17 * MIB, False)]]
    memory.malloc(30 * MIB)
    assert [sizes(found) for found in memory.segments()] == [
        [(3 * MIB, True), (30 * MIB, True), (7 * MIB, False)],
    ]
    assert memory.counters.reserved_bytes == 40 * MIB
    assert memory.stats()["segment.all.current"] == 0
    assert memory.stats()["num_device_alloc"] == 2
    assert memory.stats()["inactive_split_bytes.all.current"] == 0


def test_expandable_segment_unmaps_whole_units_only():
    memory = allocator("expandable_segments:True")
    first = memory.malloc(3 * MIB)
    memory.free(memory.malloc(70 * MIB))
    assert memory.counters.reserved_bytes == 80 * MIB
    memory.empty_cache()  # [3 used, 77 free]: the first unit stays
    assert [sizes(found) for found in memory.segments()] == [[(3 * MIB, True), (17 * MIB, False)]]
    memory.free(first)
    memory.empty_cache()
    assert memory.segments() == [] and memory.counters.reserved_bytes == 0


def test_expandable_hole_is_filled_again_at_the_lowest_address():
    memory = allocator("expandable_segments:True")
    low, middle, high = memory.malloc(20 * MIB), memory.malloc(40 * MIB), memory.malloc(20 * MIB)
    base = low.address
    memory.free(middle)
    memory.empty_cache()
    assert [(found.address - base, found.size) for found in memory.segments()] == [
        (0, 20 * MIB),
        (60 * MIB, 20 * MIB),
    ]
    assert memory.malloc(30 * MIB).address == base + 20 * MIB
    assert memory.counters.reserved_bytes == 80 * MIB
    assert high.address == base + 60 * MIB


def test_expandable_keeps_what_was_mapped_before_the_refusal():
    memory = allocator("expandable_segments:True", total=100 * MIB)
    held = memory.malloc(20 * MIB)
    hole = memory.malloc(20 * MIB)
    last = memory.malloc(20 * MIB)
    memory.free(hole)
    memory.empty_cache()
    memory.free(last)
    # free and unmapped stretch after `held`: 20 unmapped, 20 free, the rest unmapped
    with pytest.raises(OutOfMemory):
        memory.malloc(90 * MIB)
    assert memory.counters.allocated_bytes == 20 * MIB
    assert memory.counters.reserved_bytes >= 20 * MIB
    assert held.size == 20 * MIB


def test_best_fit_then_lowest_address():
    memory = allocator()
    blocks = [memory.malloc(size * MIB) for size in (40, 30, 30, 50)]
    for block in blocks:
        memory.free(block)
    assert blocks[2].address < blocks[1].address  # Linux's falls
    assert memory.malloc(30 * MIB).address == blocks[2].address
    assert memory.malloc(30 * MIB).address == blocks[1].address
    assert memory.malloc(29 * MIB).address == blocks[0].address  # 40 is the smallest left
    assert memory.counters.reserved_bytes == 150 * MIB


def test_large_block_keeps_up_to_one_mebibyte_of_slack():
    memory = allocator()
    memory.free(memory.malloc(30 * MIB))
    kept = memory.malloc(29 * MIB)
    assert kept.size == 30 * MIB  # exactly 1 MiB over: not split
    memory.free(kept)
    assert memory.malloc(29 * MIB - 512).size == 29 * MIB - 512


def test_free_merges_with_both_neighbours():
    memory = allocator()
    blocks = [memory.malloc(600 * KIB) for _ in range(3)]
    assert [len(found.blocks) for found in memory.segments()] == [4]
    memory.free(blocks[0])
    memory.free(blocks[2])
    assert [sizes(found) for found in memory.segments()] == [
        [(600 * KIB, False), (600 * KIB, True), (848 * KIB, False)]
    ]
    assert memory.stats()["inactive_split.all.current"] == 2
    memory.free(blocks[1])
    assert [sizes(found) for found in memory.segments()] == [[(2 * MIB, False)]]
    assert memory.stats()["inactive_split.all.current"] == 0
    assert memory.stats()["inactive_split_bytes.all.current"] == 0


def test_streams_never_share():
    memory = allocator()
    memory.free(memory.malloc(30 * MIB, stream=0))
    assert memory.malloc(30 * MIB, stream=7).owner.stream == 7
    assert memory.counters.reserved_bytes == 60 * MIB


def test_record_stream_bounds_of_reuse():
    for completion, reserved in ((Completion.IMMEDIATE, 30 * MIB), (Completion.AT_SYNC, 60 * MIB)):
        memory = allocator(completion=completion)
        block = memory.malloc(30 * MIB)
        memory.record_stream(block, 0)  # its own stream: nothing
        memory.record_stream(block, 3)
        memory.free(block)
        assert memory.counters.allocated_bytes == 0
        assert memory.counters.active_bytes == memory.counters.requested_bytes == 30 * MIB
        assert memory.segments()[0].blocks[0].state == "active_pending_free"
        memory.malloc(30 * MIB)
        assert memory.counters.reserved_bytes == reserved
        memory.empty_cache()
        assert memory.counters.active_bytes == memory.counters.allocated_bytes == 30 * MIB


def test_refusal_gives_the_cache_back_and_tries_again():
    memory = allocator(total=100 * MIB)
    memory.free(memory.malloc(60 * MIB))
    held = memory.malloc(2 * MIB)  # splits the 60
    memory.free(memory.malloc(40 * MIB))  # 58 of the 60 serve it
    assert memory.counters.reserved_bytes == 60 * MIB
    memory.free(held)
    assert memory.malloc(80 * MIB).size == 80 * MIB
    assert memory.counters.reserved_bytes == 80 * MIB
    stats = memory.stats()
    assert (stats["num_alloc_retries"], stats["num_device_free"], stats["num_sync_all_streams"]) == (1, 1, 1)


def test_split_segments_cannot_be_given_back():
    memory = allocator(total=100 * MIB)
    whole = memory.malloc(60 * MIB)
    memory.free(whole)
    memory.malloc(2 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        memory.malloc(60 * MIB)
    report = caught.value.report
    assert report.tried_bytes == 60 * MIB
    assert report.reserved_bytes == 60 * MIB
    assert report.allocated_bytes == 2 * MIB
    assert report.free_bytes == 40 * MIB
    assert memory.stats()["num_ooms"] == 1


def test_max_split_size_keeps_large_blocks_whole():
    memory = allocator("max_split_size_mb:64")
    memory.free(memory.malloc(100 * MIB))
    assert memory.stats()["oversize_segments.current"] == 1
    small = memory.malloc(30 * MIB)  # below the limit: an oversize block is not for it
    assert memory.counters.reserved_bytes == 130 * MIB
    memory.free(memory.malloc(81 * MIB))  # 19 MiB over, less than max_non_split_rounding: whole block
    assert memory.counters.reserved_bytes == 130 * MIB
    memory.malloc(80 * MIB)  # 20 MiB over: not this one
    assert memory.counters.reserved_bytes == 210 * MIB
    assert small.size == 30 * MIB


def test_max_split_size_frees_just_enough_oversize_segments():
    memory = allocator("max_split_size_mb:64", total=300 * MIB)
    blocks = [memory.malloc(size * MIB) for size in (70, 80, 90)]
    for block in blocks:
        memory.free(block)
    memory.malloc(130 * MIB)  # 240 held; no single one holds 130: from the largest down, 90 + 80
    assert [found.size // MIB for found in memory.segments()] == [130, 70]  # by address
    assert memory.stats()["num_alloc_retries"] == 0


def test_garbage_collection_frees_what_is_older_than_the_mean():
    # allowed 360 MiB, threshold 180 MiB
    memory = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", total=400 * MIB)
    old = memory.malloc(60 * MIB)
    young = memory.malloc(50 * MIB)
    memory.free(old)  # free since search 2
    for _ in range(3):
        memory.free(memory.malloc(52 * MIB, stream=1))
    memory.free(young)  # free since search 5
    memory.malloc(70 * MIB)
    assert memory.counters.reserved_bytes == 232 * MIB  # 162 were no reason to collect; 232 are
    memory.malloc(80 * MIB)  # search 7: ages 5, 2, 2, mean 3
    assert sorted(found.size // MIB for found in memory.segments()) == [50, 52, 70, 80]


def test_memory_fraction_limits_and_preemptive_refusal():
    memory = allocator("per_process_memory_fraction:0.5", total=100 * MIB)
    memory.malloc(40 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        memory.malloc(20 * MIB)
    assert caught.value.report.allowed_bytes == 50 * MIB
    assert "50.00 MiB allowed; " in str(caught.value)
    strict = allocator("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True", total=100 * MIB)
    strict.free(strict.malloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        strict.malloc(50 * MIB)
    assert strict.counters.reserved_bytes == 40 * MIB  # nothing was released first
    assert strict.stats()["num_oom_rejections"] == 1


def test_private_pools_stay():
    memory = allocator()
    graph = (0, 1)
    memory.create_pool(graph)
    memory.free(memory.malloc(30 * MIB, pool=graph))
    memory.empty_cache()
    assert memory.counters.reserved_bytes == 30 * MIB
    assert memory.segments()[0].pool_id == graph
    memory.malloc(30 * MIB)
    assert memory.counters.reserved_bytes == 60 * MIB


def test_private_pool_bytes_in_the_message():
    memory = allocator(total=100 * MIB)
    memory.create_pool((0, 1))
    memory.free(memory.malloc(30 * MIB, pool=(0, 1)))
    with pytest.raises(OutOfMemory, match=r"30\.00 MiB is allocated by PyTorch, with 30\.00 MiB allocated in private"):
        memory.malloc(80 * MIB)


def test_roundup_divisions():
    memory = allocator("roundup_power2_divisions:8")
    assert memory.malloc(1200).size == 1536  # 1,200 is not over 512 x 8: plain rounding to 512
    assert memory.malloc(9 * KIB + 1).size == 10 * KIB
    assert memory.malloc(8 * KIB).size == 8 * KIB
    listed = parse_config("roundup_power2_divisions:[64:8,256:4,1024:4,>:1]").roundup_power2_divisions
    assert listed == (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1)
    assert round_size(260 * MIB, listed) == 320 * MIB
    assert round_size(520 * MIB + 1, listed) == 520 * MIB + 512
    assert round_size(1025 * MIB, listed) == 1280 * MIB


def test_large_segment_size():
    memory = allocator("large_segment_size_mb:32")
    memory.malloc(3 * MIB)
    assert memory.counters.reserved_bytes == 32 * MIB


def test_an_exabyte_is_refused_outright():
    with pytest.raises(OutOfMemory, match="more than 1EB memory"):
        allocator().malloc(1 << 60)
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 1073741824\.00 GiB\."):
        allocator().malloc((1 << 60) - 512)


def test_exactly_max_split_size():
    memory = allocator("max_split_size_mb:64")
    whole = memory.malloc(100 * MIB)
    memory.free(whole)
    block = memory.malloc(64 * MIB)  # 36 MiB over, more than max_non_split_rounding: not this one
    assert block.address != whole.address and memory.counters.reserved_bytes == 164 * MIB
    memory.free(block)
    memory.malloc(30 * MIB)  # neither is for a request below the limit
    assert memory.counters.reserved_bytes == 194 * MIB
    assert memory.malloc(64 * MIB) is not None and memory.counters.reserved_bytes == 194 * MIB
    below = allocator("max_split_size_mb:64")
    below.free(below.malloc(62 * MIB))
    assert below.malloc(30 * MIB).size == 30 * MIB and below.counters.reserved_bytes == 62 * MIB  # it is split


@pytest.mark.parametrize("is_last", [True, False])
def test_a_free_block_before_unmapped_memory_is_kept_for_what_grows(is_last):
    """Of free blocks of 20 and 30 MiB, the smaller one, unless it could grow into the unmapped memory behind it."""
    memory = allocator("expandable_segments:True")
    large, _, small = memory.malloc(30 * MIB), memory.malloc(10 * MIB), memory.malloc(20 * MIB)
    if not is_last:
        memory.malloc(20 * MIB)
    memory.free(large)
    memory.free(small)
    assert memory.malloc(15 * MIB).address == (large if is_last else small).address
    assert memory.counters.reserved_bytes == (60 if is_last else 80) * MIB


def test_expandable_segments_that_are_turned_off_serve_nothing():
    memory = allocator("expandable_segments:True")
    memory.free(memory.malloc(20 * MIB))
    memory.expandable = False
    assert memory.malloc(20 * MIB).segment.expandable is False and memory.counters.reserved_bytes == 40 * MIB
    memory.free(memory.malloc(15 * MIB))  # the only free blocks are expandable, or too small
    assert memory.counters.reserved_bytes == 56 * MIB
    assert memory.malloc(16 * MIB).segment.expandable is False and memory.counters.reserved_bytes == 56 * MIB
    memory.free(memory.malloc(30 * MIB))
    assert memory.malloc(18 * MIB).size == 18 * MIB  # of the 30, not of the expandable 20
    assert memory.counters.reserved_bytes == 86 * MIB


def test_garbage_collection_counts_only_searches_while_it_is_on():
    memory = allocator("garbage_collection_threshold:0.5")  # of no limit: it is off
    memory.free(memory.malloc(60 * MIB))
    memory.malloc(70 * MIB)
    assert memory.default_pool.large.num_searches == 0
    limited = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", total=400 * MIB)
    limited.free(limited.malloc(60 * MIB))
    limited.malloc(70 * MIB)
    assert limited.default_pool.large.num_searches == 2


@pytest.mark.parametrize(("size", "released"), [(49, 0), (50, 100), (80, 100)])
def test_garbage_is_collected_above_the_threshold(size, released):
    """Of 360 MiB, more than 180 are reserved: then as many oldest segments go as are needed, of equal age all."""
    memory = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", total=400 * MIB)
    blocks = [memory.malloc(50 * MIB) for _ in range(2)]
    memory.malloc((80 if size == 49 else 82) * MIB)
    for block in blocks:
        memory.free(block)
    before = memory.counters.reserved_bytes
    memory.malloc((size + 2) * MIB)
    assert memory.counters.reserved_bytes == before + (size + 2 + (size + 2) % 2) * MIB - released * MIB
    assert memory.stats()["num_alloc_retries"] == 0


def test_a_private_pool_is_released_once_it_is_retired():
    memory = allocator()
    memory.create_pool((0, 1))
    memory.free(memory.malloc(30 * MIB, pool=(0, 1)))
    memory.free(memory.malloc(1000, pool=(0, 1)))
    memory.retire_pool((0, 9))  # is none
    memory.empty_cache()
    assert memory.counters.reserved_bytes == 32 * MIB
    memory.retire_pool((0, 1))
    memory.empty_cache()
    assert memory.segments() == []


def test_what_a_failed_request_says_of_private_pools():
    """Free blocks of private pools count as allocated, on each stream and of both sizes; others do not."""
    memory = allocator(total=100 * MIB)
    memory.create_pool((0, 1))
    for num_bytes, stream, pool in ((30 * MIB, 0, (0, 1)), (12 * MIB, 7, (0, 1)), (1000, 0, (0, 1))):
        memory.free(memory.malloc(num_bytes, stream, pool))
    split = memory.malloc(10 * MIB - 512)
    with pytest.raises(OutOfMemory) as caught:
        memory.malloc(80 * MIB)
    report = caught.value.report
    assert (report.private_pool_bytes, report.allocated_bytes) == (44 * MIB, 44 * MIB + split.size)
    assert (report.reserved_bytes, report.free_bytes, report.total_bytes) == (64 * MIB, 36 * MIB, 100 * MIB)
    assert (report.requested_bytes, report.tried_bytes, report.allowed_bytes) == (80 * MIB, 80 * MIB, None)


def test_a_memory_fraction_at_its_edge():
    memory = allocator("per_process_memory_fraction:0.5", total=100 * MIB)
    memory.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        memory.malloc(22 * MIB)
    memory.malloc(20 * MIB)
    assert memory.counters.reserved_bytes == memory.allowed_bytes == 50 * MIB
    assert allocator("per_process_memory_fraction:1", total=100 * MIB).allowed_bytes is None
    assert allocator("per_process_memory_fraction:0.999", total=100 * MIB).allowed_bytes == int(0.999 * 100 * MIB)
    assert allocator("per_process_memory_fraction:0.5", total=None).allowed_bytes is None


@pytest.mark.parametrize(
    ("settings", "total", "space"),
    [
        ("", 80 * MIB, 90 * MIB),  # nine eighths
        ("expandable_segments_reserve:0.5", 80 * MIB, 40 * MIB),
        ("expandable_segments_reserve:3G", 80 * MIB, 3 * GIB),
        ("", None, 1 << 50),
    ],
)
def test_address_space_of_an_expandable_segment(settings, total, space):
    memory = allocator(f"expandable_segments:True,{settings}".rstrip(","), total=total)
    assert memory.segment_store.address_space == space
    block = memory.malloc(3 * MIB)
    assert block.segment.size == -(-space // (20 * MIB)) * 20 * MIB  # in whole units
    small = memory.malloc(1000)
    assert small.segment.size == -(-space // (2 * MIB)) * 2 * MIB
    assert memory.counters.reserved_bytes == 22 * MIB


def test_a_request_larger_than_the_address_space():
    memory = allocator("expandable_segments:True,expandable_segments_reserve:40e-3G", total=100 * MIB)
    assert memory.malloc(40 * MIB) is not None
    with pytest.raises(OutOfMemory):
        memory.malloc(61 * MIB)


def test_release_2_0_has_no_expandable_segments():
    memory = allocator("expandable_segments:True", release=parse_release("2.0"))
    assert not memory.malloc(3 * MIB).segment.expandable


@pytest.mark.parametrize(("threshold", "num_released"), [(0.3, 2), (0.5, 1), (0.1, 3)])
def test_garbage_collection_goes_on_with_the_mean_of_what_is_left(threshold, num_released):
    """Ages 10, 2 and 1: first the oldest alone; of the others, the older one; then the last."""
    memory = allocator(f"garbage_collection_threshold:{threshold},per_process_memory_fraction:0.9", total=400 * MIB)
    clock = memory.malloc(12 * MIB, stream=1)
    blocks = [memory.malloc(60 * MIB) for _ in range(3)]

    def search(times):
        nonlocal clock
        for _ in range(times):
            memory.free(clock)
            clock = memory.malloc(12 * MIB, stream=1)

    for block, times in zip(blocks, (8, 1, 0), strict=True):
        memory.free(block)
        search(times)
    assert memory.counters.reserved_bytes == 192 * MIB
    memory.malloc(90 * MIB)
    sizes = sorted(found.size // MIB for found in memory.segments())
    assert sizes == [12, *[60] * (3 - num_released), 90]


def test_a_single_old_segment_is_collected():
    memory = allocator("garbage_collection_threshold:0.1,per_process_memory_fraction:0.9", total=400 * MIB)
    memory.free(memory.malloc(60 * MIB))
    memory.malloc(90 * MIB)
    assert memory.counters.reserved_bytes == 90 * MIB


def test_split_and_expandable_memory_is_no_garbage():
    conf = "garbage_collection_threshold:0.1,per_process_memory_fraction:0.9"
    memory = allocator(conf, total=400 * MIB)
    memory.free(memory.malloc(60 * MIB))
    memory.malloc(20 * MIB)  # of the 60
    memory.malloc(90 * MIB)
    assert memory.counters.reserved_bytes == 150 * MIB
    expandable = allocator(f"{conf},expandable_segments:True", total=400 * MIB)
    expandable.free(expandable.malloc(60 * MIB))
    expandable.malloc(90 * MIB, stream=1)
    assert expandable.counters.reserved_bytes == 160 * MIB


def test_of_free_blocks_before_unmapped_memory_the_one_that_could_grow_least():
    """20 MiB before 60 unmapped, 25 before 40, and 30 between live blocks."""
    memory = allocator("expandable_segments:True")
    first, hole, _, second, other_hole, _, enclosed, _ = (
        memory.malloc(size * MIB) for size in (20, 60, 15, 25, 40, 10, 30, 10)
    )
    memory.free(hole)
    memory.free(other_hole)
    memory.empty_cache()
    assert memory.counters.reserved_bytes == 120 * MIB
    for block in (first, second, enclosed):
        memory.free(block)
    assert memory.malloc(15 * MIB).address == enclosed.address
