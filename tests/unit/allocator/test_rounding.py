"""Rounding of requests to blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.allocator.rounding import MIN_BLOCK, round_size, segment_size
from memprof.units import MIB


@pytest.mark.parametrize(
    ("requested", "block"),
    [
        (0, 0),
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (1024, 1024),
        (8_519_680, 8_519_680),
        ((1 << 40) + 1, (1 << 40) + 512),
    ],
)
def test_vectors(requested: int, block: int) -> None:
    assert round_size(requested) == block


@given(st.integers(0, 1 << 45))
def test_smallest_multiple_that_holds_the_request(requested: int) -> None:
    block = round_size(requested)
    assert block % MIN_BLOCK == 0 and requested <= block < requested + MIN_BLOCK


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (12 * MIB + 512, 14 * MIB),
    ],
)
def test_segments_of_each_size_class_at_its_edges(block: int, segment: int) -> None:
    assert segment_size(block) == segment


def test_a_large_segment_of_another_size_is_for_the_same_blocks() -> None:
    sizes = [segment_size(block, 32 * MIB) for block in (MIB, MIB + 512, 10 * MIB - 512, 10 * MIB)]
    assert sizes == [2 * MIB, 32 * MIB, 32 * MIB, 10 * MIB]


@pytest.mark.parametrize(
    ("requested", "divisions", "block"),
    [
        (MIB, (4,), MIB),  # a power of two
        (MIB + 1, (4,), MIB + 256 * 1024),
        (MIB + 1, (2,), MIB + 512 * 1024),
        (0, (4,), 0),
        (MIB + 256 * 1024, (4,), MIB + 256 * 1024),
        (MIB + 256 * 1024 + 1, (4,), MIB + 512 * 1024),
        (2 * MIB - 1, (4,), 2 * MIB),
        (2 * MIB + 1, (4, 8), 2 * MIB + 256 * 1024),  # the octave's own entry
        (2 * MIB - 1, (1, 8), 2 * MIB),  # one part: as without the setting
        (MIB + 1, (1, 8), MIB + 512),
        (2048, (4,), 2048),  # four blocks of 512 bytes have no smaller parts
        (2049, (4,), 2560),
        (2561, (4,), 3072),
        (511, (4,), 512),
        ((1 << 40) + 1, (2,) * 15 + (8,), (1 << 40) + (1 << 37)),  # beyond the last octave, its entry
    ],
)
def test_parts_of_a_power_of_two(requested: int, divisions: tuple[int, ...], block: int) -> None:
    assert round_size(requested, divisions) == block
