"""vLLM's sleep mode: memory of its pools is freed, and allocated again as what it was."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.patching import PatchSet
from memprof.stubs.vllm.sleep import SleepMode
from memprof.trace.events import Role
from memprof.virtual import VirtualGpu

MIB = 1 << 20


class CuMemAllocator:
    default_tag = "default"


@pytest.fixture
def pool():
    """Yield the virtual GPU, an allocator, and a tensor of 4 MiB of weights and one of 8 MiB of KV cache."""
    module: Any = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator, module.cumem_available = CuMemAllocator, False
    with VirtualGpu(find_gpu("rtx-4090")) as gpu, PatchSet() as patches:
        patches.apply_all(SleepMode(gpu._context).get_patches(module))
        assert module.cumem_available
        allocator: Any = CuMemAllocator()
        with allocator.use_memory_pool(tag="weights"):
            weights = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
            torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")  # freed in the pool
        with allocator.use_memory_pool("kv_cache"):
            cache = torch.empty(8, MIB, dtype=torch.uint8, device="cuda")
        yield gpu.recorder, allocator, weights, cache


def test_a_sleeping_engine_leaves_its_memory_to_others(pool):
    recorder, allocator, weights, cache = pool
    others = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert allocator.get_current_usage() == 12 * MIB
    allocator.sleep(offload_tags=("weights",))
    assert recorder.storages.live_bytes == others.nbytes
    allocator.sleep(offload_tags=("weights",))  # again: nothing is awake
    on_host = [each.num_bytes for each in recorder.trace.storages if each.device == "cpu"]
    assert on_host == [4 * MIB]  # the cache is not backed up
    allocator.wake_up(["weights"])
    assert recorder.storages.live_bytes == others.nbytes + 4 * MIB
    allocator.wake_up()
    assert recorder.storages.live_bytes == others.nbytes + 12 * MIB == others.nbytes + allocator.get_current_usage()
    assert (weights + 1).shape == (4 * MIB,) and cache[0].is_cuda


def test_what_wakes_up_is_what_slept(pool):
    recorder, allocator, _, cache = pool
    trace, index_of = recorder.trace, recorder.storages.get_index
    before = index_of(cache)
    allocator.sleep()
    allocator.wake_up(None)
    assert index_of(cache) != before
    assert trace.storages[index_of(cache)] == trace.storages[before]
    assert trace.owners[index_of(cache)].role is Role.KV_CACHE


def test_a_cache_that_is_discarded(pool):
    recorder, allocator, weights, _ = pool
    allocator.discard("kv_cache")
    assert recorder.storages.live_bytes == weights.nbytes
