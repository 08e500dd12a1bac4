"""The bytes that a rounded size may stand for."""

from __future__ import annotations

import pytest

from memprof.doctor.diagnosis import PrintedSize
from memprof.doctor.message_sizes import read_size
from memprof.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("number", "unit", "num_bytes", "low", "high"),
    [
        ("512", "bytes", 512, 512, 512),
        ("2", "KiB", 2 * KIB, 1536, 2560),  # whole numbers are rounded by half
        ("1.5", "MiB", 3 * MIB // 2, 1_520_436, 1_625_292),  # 1.45 and 1.55
        ("2.00", "GiB", 2 * GIB, 2_142_114_939, 2_152_852_357),  # 1.995 and 2.005, both inward
        ("2.00", "GB", 2 * GIB, 2_142_114_939, 2_152_852_357),  # torch's is no decimal one
        ("0.00", "GiB", 0, 0, 5_368_709),
    ],
)
def test_a_size_has_the_range_that_is_printed_so(number: str, unit: str, num_bytes: int, low: int, high: int) -> None:
    assert read_size(number, unit) == PrintedSize(f"{number} {unit}", num_bytes, low, high)
