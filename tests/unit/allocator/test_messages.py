"""The out-of-memory message, letter by letter as the releases print it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memprof.allocator import OomReport, OutOfMemory, format_size, parse_release
from memprof.allocator.releases import LATEST
from memprof.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

REPORT = OomReport(
    requested_bytes=1500 * MIB,
    tried_bytes=1500 * MIB,
    total_bytes=24 * GIB - 352 * MIB,
    free_bytes=700 * MIB + 77,
    allocated_bytes=20 * GIB,
    reserved_bytes=22 * GIB + GIB // 2,
)

HEAD = (
    "CUDA out of memory. Tried to allocate 1.46 GiB. GPU 0 has a total capacity of 23.66 GiB of which 700.00 MiB is "
    "free. "
)
BODY = "Of the allocated memory 20.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch but unallocated."
OLD_URL = "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
NEW_URL = "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
LARGE = " If reserved but unallocated memory is large try setting "
SEE = " to avoid fragmentation.  See documentation for Memory Management "

EXPECTED = {
    "2.0.1": (
        "CUDA out of memory. Tried to allocate 1.46 GiB (GPU 0; 23.66 GiB total capacity; 20.00 GiB already allocated; "
        "700.00 MiB free; 22.50 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try "
        "setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and "
        "PYTORCH_CUDA_ALLOC_CONF"
    ),
    "2.1.2": HEAD.replace("capacity", "capacty")
    + BODY
    + LARGE
    + "max_split_size_mb"
    + SEE
    + "and PYTORCH_CUDA_ALLOC_CONF",
    "2.2.0": HEAD + BODY + LARGE + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + SEE + " " + OLD_URL,
    "2.6.0+cu124": HEAD + BODY + LARGE + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + SEE + " " + OLD_URL,
    "2.9.1": HEAD + BODY + LARGE + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + SEE + " " + OLD_URL,
    "2.10.0": HEAD + BODY + LARGE + "PYTORCH_ALLOC_CONF=expandable_segments:True" + SEE + " " + OLD_URL,
    "2.11.0": HEAD + BODY + LARGE + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + SEE + " " + NEW_URL,
    "2.12.1": HEAD + BODY + LARGE + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + SEE + " " + NEW_URL,
    "2.15.0": HEAD + BODY + LARGE + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" + SEE + " " + NEW_URL,
}


@pytest.mark.parametrize("version", EXPECTED)
def test_message(version):
    assert REPORT.message(parse_release(version)) == EXPECTED[version]


def test_message_of_an_intel_gpu():
    """c10/xpu/XPUCachingAllocator.cpp, malloc."""
    end = " Please use `empty_cache` to release all unoccupied cached memory."
    report = replace(REPORT, backend="xpu", process_bytes=GIB, private_pool_bytes=MIB)
    assert report.message() == HEAD.replace("CUDA", "XPU") + BODY + end
    allowed = replace(report, allowed_bytes=3 * GIB)
    assert allowed.message() == HEAD.replace("CUDA", "XPU") + "3.00 GiB allowed; " + BODY + end


def test_optional_parts():
    report = OomReport(
        requested_bytes=3 * MIB,
        tried_bytes=20 * MIB,
        total_bytes=8 * GIB,
        free_bytes=0,
        allocated_bytes=3 * GIB,
        reserved_bytes=4 * GIB,
        private_pool_bytes=64 * MIB,
        allowed_bytes=4 * GIB,
        process_bytes=4 * GIB + 500 * MIB,
        device=3,
    )
    assert report.message(parse_release("2.13")).startswith(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 8.00 GiB of which 0 bytes is "
        "free. Including non-PyTorch memory, this process has 4.49 GiB memory in use. 4.00 GiB allowed; Of the "
        "allocated memory 3.00 GiB is allocated by PyTorch, with 64.00 MiB allocated in private pools (e.g., CUDA "
        "Graphs), and 1024.00 MiB is reserved by PyTorch but unallocated."
    )
    assert "4.00 GiB allowed; 4.00 GiB reserved in total by PyTorch)" in report.message(parse_release("2.0"))


def test_the_process_has_its_context_and_what_is_reserved():
    report = REPORT.add_process_bytes(500 * MIB)
    assert report.process_bytes == 22 * GIB + 1012 * MIB
    assert "this process has 22.99 GiB memory in use" in report.message() and "this process" not in REPORT.message()


def test_a_failed_allocation_has_the_exit_code_of_what_does_not_fit():
    error = OutOfMemory(REPORT, parse_release("2.6"))
    assert error.exit_code == 3 and error.report is REPORT and "PYTORCH_CUDA_ALLOC_CONF=" in str(error)
    assert REPORT.message() == REPORT.message(LATEST)


def test_a_request_of_an_exabyte():
    for version in ("2.0", "2.13"):
        release = parse_release(version)
        huge, below = (replace(REPORT, requested_bytes=(1 << 60) - less).message(release) for less in (0, 1))
        assert huge == "CUDA out of memory. Tried to allocate more than 1EB memory." and "1.46 GiB" in below


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (MIB + 1, "1.00 MiB"),
        (GIB, "1024.00 MiB"),
        (GIB + 1, "1.00 GiB"),
        (1536 * GIB, "1536.00 GiB"),
    ],
)
def test_format_size(num_bytes, text):
    assert format_size(num_bytes) == text


def test_releases():
    assert parse_release("2.13.0+cpu").version == parse_release(" v2.13").version == (2, 13)
    assert parse_release("2.0").version == (2, 0) and parse_release("2.1").has_expandable_segments
    assert LATEST.version == (2, 15) and parse_release("2.9").has_unified_settings
    assert not parse_release("2.8").has_unified_settings
    assert not parse_release("2.0").has_expandable_segments
    for wrong in ("1.13.1", "torch", ""):
        with pytest.raises(UsageError):
            parse_release(wrong)
