"""Live blocks in groups, and segments after an event, by hand."""

from __future__ import annotations

import pytest

from memprof.ledger.categories import Category
from memprof.snapshots.occupancy import Fragmentation, Group, group_blocks, list_segments, measure_fragmentation
from memprof.snapshots.origins import UNKNOWN, Origin, Part
from memprof.snapshots.recording import BlockLife, Recording, build_recordings
from tests.unit.snapshots.builder import MIB, Program

KIB = 1024


def only(program: Program) -> Recording:
    (found,) = build_recordings(program.snapshot())
    return found


def life(
    size: int, source: str = "a.py:1 f", module: str = "net", op: str = "mm", category: str = "inputs"
) -> BlockLife:
    kind = Category(category)
    return BlockLife(0, size - 12, size, 0, 0, (), Origin(source, op, module, Part.FORWARD, kind, True), kind)


@pytest.mark.parametrize(
    ("size", "key"),
    [
        (512, "512 bytes"), (1024, "to 64 KiB"), (64 * KIB, "to 64 KiB"), (64 * KIB + 512, "to 1 MiB"),
        (MIB, "to 1 MiB"), (MIB + 512, "1 to 10 MiB"), (10 * MIB, "1 to 10 MiB"), (10 * MIB + 512, "10 to 100 MiB"),
        (100 * MIB, "10 to 100 MiB"), (100 * MIB + 512, "100 MiB to 1 GiB"), (1024 * MIB, "100 MiB to 1 GiB"),
        (1024 * MIB + 512, "1 GiB and more"),
    ],
)  # fmt: skip
def test_size_classes_at_their_edges(size: int, key: str) -> None:
    (group,) = group_blocks([life(size)], "size")
    assert (group.key, group.allocated_bytes, group.requested_bytes, group.count) == (key, size, size - 12, 1)


def test_a_group_has_the_operator_and_the_module_of_most_of_its_bytes() -> None:
    lives = [life(512, op="add", module="layers.0"), life(2048, op="mm", module="layers.1"), life(1024, module="head")]
    lives += [life(1024, op="add", module="head")] * 2
    assert group_blocks(lives, "frame") == [Group("a.py:1 f", 5632, 5632 - 60, 5, Category.INPUTS, "mm", "head")]
    assert [(group.key, group.count) for group in group_blocks(lives, "module")] == [("head", 3), ("layers.*", 2)]


def test_groups_are_largest_first_then_by_name_and_category() -> None:
    lives = [
        life(512, "b.py:1 f"),
        life(512, "a.py:1 f"),
        life(512, "a.py:1 f", category="buffers"),
        life(1024, "c.py:1 f"),
    ]
    groups = [(group.key, group.category.value) for group in group_blocks(lives, "frame")]
    assert groups == [("c.py:1 f", "inputs"), ("a.py:1 f", "buffers"), ("a.py:1 f", "inputs"), ("b.py:1 f", "inputs")]
    assert [group.key for group in group_blocks(lives, "category")] == ["inputs", "buffers"]


def test_names_without_a_line_are_those_of_all_layers() -> None:
    lives = [life(512, source) for source in ("parameter layers.0.weight", "parameter layers.1.weight", "v.2.py:1 f")]
    assert [group.key for group in group_blocks(lives, "frame")] == ["parameter layers.*.weight", "v.2.py:1 f"]


def test_segments_after_each_event() -> None:
    """A segment of 30 MiB, one of 20 that two blocks of 3 and 4 MiB share, and the first released."""
    program = Program()
    first = program.malloc(30 * MIB)
    second, third = program.malloc(3 * MIB), program.malloc(4 * MIB)
    program.free(first, second)
    program.recorder.allocator.empty_cache()
    found = only(program)

    def shown(event: int) -> list[tuple[int, ...]]:
        segments = list_segments(found, event, found.alive(event))
        assert all(one.free == one.size - one.used and one.pinned == one.free - one.releasable for one in segments)
        return sorted(
            (one.size // MIB, one.used // MIB, one.largest_free // MIB, one.releasable // MIB, len(one.live))
            for one in segments
        )

    # segment, 30; segment, 3; 4; free, completed; free, completed; segment freed
    assert shown(0) == [(30, 0, 30, 30, 0)]
    assert shown(1) == [(30, 30, 0, 0, 1)]
    assert shown(2) == [(20, 0, 20, 20, 0), (30, 30, 0, 0, 1)]
    assert shown(4) == [(20, 7, 13, 0, 2), (30, 30, 0, 0, 1)]
    assert shown(6) == [(20, 7, 13, 0, 2), (30, 0, 30, 30, 0)]
    assert shown(8) == [(20, 4, 13, 0, 1), (30, 0, 30, 30, 0)]
    assert shown(9) == [(20, 4, 13, 0, 1)] and third is not None
    (segment,) = list_segments(found, 9, found.alive(9))
    assert [life.address for life in segment.live] == [third.address]
    assert shown(-1) == []


def test_mapped_units_of_each_pool() -> None:
    """Of 6 MiB of the small pool, the first 3 are in use; of 80 of the large one, 3, and 20 behind a hole of 40."""
    program = Program("expandable_segments:True")
    small = [program.malloc(MIB) for _ in range(6)]
    program.malloc(3 * MIB)
    hole = program.malloc(57 * MIB)
    program.malloc(5 * MIB)
    program.free(*small[3:], hole)
    found = only(program)
    small_pool, large_pool = list_segments(found, found.end, found.alive(found.end))
    assert (small_pool.is_small, small_pool.size, small_pool.used) == (True, 6 * MIB, 3 * MIB)
    assert (small_pool.releasable, small_pool.largest_free) == (2 * MIB, 3 * MIB)
    assert (large_pool.is_small, large_pool.size, large_pool.used) == (False, 80 * MIB, 8 * MIB)
    assert (large_pool.releasable, large_pool.largest_free) == (40 * MIB, 57 * MIB)


def test_fragmentation_of_a_recording() -> None:
    program = Program()
    pinned = [program.malloc(size) for size in (12 * MIB, 1000)]
    program.free(program.malloc(40 * MIB), pinned[0])
    program.malloc(2 * MIB)  # of the 12
    found = only(program)
    state, segments = measure_fragmentation(found, found.end)
    small = 2 * MIB - 1024
    assert state == Fragmentation(
        event=found.end,
        reserved_bytes=54 * MIB,
        used_bytes=2 * MIB + 1024,
        free_bytes=52 * MIB - 1024,
        rounding_bytes=24,
        releasable_bytes=40 * MIB,
        pinned_bytes=10 * MIB + small,
        largest_free_bytes=40 * MIB,
        segments=3,
        nearly_empty_segments=2,
    )
    assert [segment.size // MIB for segment in segments] == [12, 2, 40]  # most pinned first
    empty, none = measure_fragmentation(found, -1)
    assert none == [] and (empty.largest_free_bytes, empty.reserved_bytes, empty.segments) == (0, 0, 0)


def test_a_large_part_of_an_expandable_segment_is_nearly_empty_by_what_stays() -> None:
    """Of 100 MiB, 80 can be released: the 4 in use are less than a quarter of the other 20, 5 are not."""
    for num_bytes, is_nearly_empty in ((5 * MIB - 512, True), (5 * MIB, False)):
        program = Program("expandable_segments:True")
        program.malloc(num_bytes)
        program.free(program.malloc(95 * MIB))
        found = only(program)
        (segment,) = measure_fragmentation(found, found.end)[1]
        assert (segment.releasable // MIB, segment.is_nearly_empty) == (80, is_nearly_empty)


def test_blocks_that_overlap_or_reach_over_the_end_are_not_counted_twice() -> None:
    program = Program()
    program.malloc(30 * MIB)
    found = only(program)
    (old,) = found.lives
    places = ((2, 6), (4, 2), (20, 30))
    lives = [BlockLife(old.address + at * MIB, 1, size * MIB, 0, 0, (), UNKNOWN) for at, size in places]
    (segment,) = list_segments(found, found.end, lives)
    assert (segment.used // MIB, segment.largest_free // MIB, segment.releasable) == (16, 12, 0)
