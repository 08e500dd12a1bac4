"""The bytes that a rounded size may stand for."""

from __future__ import annotations

import pytest

from memprof.doctor.diagnosis import PrintedSize
from memprof.doctor.message_sizes import (
    add_sizes,
    format_size,
    read_caching_allocator,
    read_malloc_async,
    read_mps,
    read_size,
    subtract_sizes,
)
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


def test_sums_and_differences_have_the_range_of_their_parts() -> None:
    first, second = (
        PrintedSize("3.0 GiB", 3 * GIB, 3 * GIB - 7, 3 * GIB + 8),
        PrintedSize("1 GiB", GIB, GIB - 2, GIB + 5),
    )
    assert add_sizes(first, second) == PrintedSize("4.00 GiB", 4 * GIB, 4 * GIB - 9, 4 * GIB + 13)
    assert subtract_sizes(first, second) == PrintedSize("2.00 GiB", 2 * GIB, 2 * GIB - 12, 2 * GIB + 10)
    assert subtract_sizes(second, first) == PrintedSize("0 bytes", 0, 0, 0)
    assert format_size(5 * MIB) == PrintedSize("5.00 MiB", 5 * MIB, 5 * MIB, 5 * MIB)


@pytest.mark.parametrize(
    ("tried", "is_segment"),
    [
        ("2.00 MiB", True),
        ("3.00 MiB", False),  # segments are multiples of 2 MiB
        ("2.50 MiB", False),
        ("2.33 GiB", True),  # whichever it is, it is printed so
        ("512.00 KiB", False),
        ("2048.00 KiB", False),
        ("512 bytes", False),
    ],
)
def test_a_request_of_whole_segments_is_one(tried: str, is_segment: bool) -> None:
    assert read_caching_allocator(f"Tried to allocate {tried}. GPU 0").tried_is_segment == is_segment


def test_only_torch_s_caching_allocator_asks_for_segments() -> None:
    assert not read_caching_allocator("CUDA out of memory.").tried_is_segment
    assert not read_malloc_async("Requested : 2.00 GiB").tried_is_segment


@pytest.mark.parametrize(
    ("message", "device"), [("GPU 3 has", 3), ("(GPU 12; 2", 12), ("XPU 4 has", 4), ("XPU 1; ", 1), ("on a GPU", None)]
)
def test_the_device_of_a_message(message: str, device: int | None) -> None:
    assert read_caching_allocator(message).device == device


@pytest.mark.parametrize(("process", "is_believed"), [("4.00 GiB", True), ("3.99 GiB", False)])
def test_a_process_smaller_than_its_tensors_is_not_believed(process: str, is_believed: bool) -> None:
    message = f"this process has {process} memory in use. Of the allocated memory 4.00 GiB is allocated by PyTorch"
    assert (read_caching_allocator(message).process is not None) == is_believed


def test_a_process_of_exactly_its_tensors_is_believed() -> None:
    message = "this process has 4096 bytes memory in use. Of the allocated memory 4096 bytes is allocated by PyTorch"
    assert read_caching_allocator(message).process == PrintedSize("4096 bytes", 4096, 4096, 4096)


@pytest.mark.parametrize(("gib", "pids"), [((1 << 30) - 1, [7]), (1 << 30, []), (17179869184, [])])
def test_sizes_that_the_driver_does_not_know_are_none(gib: int, pids: list[int]) -> None:
    message = f"Process 7 has {gib}.00 GiB memory in use."
    assert [pid for pid, _ in read_caching_allocator(message).others] == pids
    total = read_caching_allocator(f"GPU 0 has a total capacity of {gib}.00 GiB").total
    assert (total is not None) == bool(pids)


def test_metal_without_its_own_figure_has_no_process() -> None:
    assert read_mps("Tried to allocate 2.00 GiB. other allocations: 1.00 GiB").process is None
    assert read_mps("Tried to allocate 2.00 GiB. MPS allocated: 1.00 GiB").process is None
