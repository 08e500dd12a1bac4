"""What differs between releases of torch: the first release that has a change, and the libraries of a wheel."""

from __future__ import annotations

import pytest

from memprof.allocator.releases import Change, Libraries, Release, find_libraries

FIRST = {
    "EXPANDABLE_SEGMENTS": (2, 1), "UNIFIED_SETTINGS": (2, 9), "PER_PROCESS_MEMORY_FRACTION": (2, 10),
    "LARGE_SEGMENT_SIZE": (2, 11), "THROW_ON_CUDAMALLOC_OOM": (2, 12), "SEGMENTS_RESERVE": (2, 15),
    "LT_WORKSPACE_KEPT": (2, 9), "LT_WORKSPACE_SHARED": (2, 12), "BLACKWELL_WORKSPACE": (2, 12),
    "WORKSPACE_PER_CALL": (2, 15), "CUDNN_3D_WORKAROUND": (2, 9), "TOPK_DIGIT_SUMS": (2, 10),
    "EIGENVALUES_ON_GPU": (2, 11), "EFFICIENT_GROUPS": (2, 15),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_a_change_is_in_its_first_release_and_not_in_the_one_before(name: str) -> None:
    major, minor = FIRST[name]
    assert [Change[name].is_in((major, minor + more)) for more in (-1, 0, 1)] == [False, True, True]


@pytest.mark.parametrize(
    ("setting", "since"),
    [
        ("per_process_memory_fraction", (2, 10)),
        ("large_segment_size_mb", (2, 11)),
        ("throw_on_cudamalloc_oom", (2, 12)),
        ("expandable_segments_reserve", (2, 15)),
        ("expandable_segments_reserve_by_class", (2, 15)),
        ("max_split_size_mb", (2, 0)),
    ],
)
def test_a_setting_is_known_from_a_release_on(setting: str, since: tuple[int, int]) -> None:
    assert Release(since).has_setting(setting)
    assert Release((since[0], since[1] - 1)).has_setting(setting) == (since == (2, 0))


@pytest.mark.parametrize(
    ("version", "libraries"),
    [
        ((2, 0), ("11.7", 8_500, (2, 14, 3))),
        ((2, 1), ("12.1", 8_902, (2, 18, 1))),
        ((2, 2), ("12.1", 8_902, (2, 19, 3))),
        ((2, 3), ("12.1", 8_902, (2, 20, 5))),
        ((2, 4), ("12.1", 90_100, (2, 20, 5))),
        ((2, 5), ("12.4", 90_100, (2, 21, 5))),
        ((2, 6), ("12.4", 90_100, (2, 21, 5))),
        ((2, 7), ("12.6", 90_501, (2, 26, 2))),
        ((2, 8), ("12.8", 91_002, (2, 27, 3))),
        ((2, 9), ("12.8", 91_002, (2, 27, 5))),
        ((2, 10), ("12.8", 91_002, (2, 27, 5))),
        ((2, 11), ("13.0", 91_900, (2, 28, 9))),
        ((2, 12), ("13.0", 92_000, (2, 29, 7))),
        ((2, 13), ("13.0", 92_000, (2, 29, 7))),
        ((2, 14), ("13.0", 92_400, (2, 30, 7))),
        ((2, 15), ("13.0", 92_400, (2, 30, 7))),
    ],
)
def test_libraries_are_those_that_the_wheel_requires(
    version: tuple[int, int], libraries: tuple[str, int, tuple[int, int, int]]
) -> None:
    """Of the last release before it, if those of the release are the same, or were not inspected."""
    assert find_libraries(version) == Libraries(*libraries)
