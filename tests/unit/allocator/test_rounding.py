"""Rounding of requests to blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.allocator.rounding import MIN_BLOCK, round_size


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
