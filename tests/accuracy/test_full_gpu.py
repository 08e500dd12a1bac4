"""A program that fills an H100: its requests, replayed, are refused where the GPU refused them.

Recorded: a U-Net (batch 62 of 256x256 images, bfloat16 autocast) under torch 2.11, to its out-of-memory error. Events
are [kind, block, bytes]; kind 0 allocates, 1 frees, 2 is the request that failed.
"""

from __future__ import annotations

import gzip
import json

import pytest

from memprof.allocator.caching import CachingAllocator
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.releases import parse_release
from memprof.device.catalog import find_gpu
from tests.accuracy.truth import compare

RECORDED = [path for folder in compare.folders() if (path := folder / "full_gpu.json.gz").is_file()]


def test_a_full_gpu_refuses_the_same_request() -> None:
    """Peaks, releases of the cache and the failed request are those of the GPU, to the byte."""
    for path in RECORDED:
        recorded = json.loads(gzip.decompress(path.read_bytes()))
        driver = SimulatedDriver(recorded["total_bytes"], find_gpu("h100-80gb").context_bytes)
        allocator = CachingAllocator(recorded["total_bytes"], None, parse_release("2.11.0"), driver)
        blocks = {}
        *served, failed = recorded["events"]
        for kind, block, num_bytes in served:
            if kind == 0:
                blocks[block] = allocator.malloc(num_bytes, 0)
            else:
                allocator.free(blocks.pop(block))
        with pytest.raises(OutOfMemory):
            allocator.malloc(failed[2], 0)
        counters = allocator.counters
        peaks = (counters.allocated_bytes_peak, counters.reserved_bytes_peak)
        assert peaks == (recorded["allocated_peak"], recorded["reserved_peak"])
        assert allocator.statistics.num_alloc_retries == recorded["retries"]
    assert RECORDED
