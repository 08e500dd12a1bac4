"""A larger GPU for an engine that does not start: the smallest on which it does, of those that are larger."""

from __future__ import annotations

import pytest

from memprof.device.catalog import Gpu, find_gpu, list_suggested_gpus
from memprof.estimate.serving.changes import add_larger_gpu
from memprof.estimate.serving.options import ServingOptions
from memprof.serving.budget import EngineBudget
from memprof.units import GIB


@pytest.mark.parametrize("least_gib", [0, 30, 100])
def test_the_smallest_larger_gpu_on_which_it_starts(least_gib: int) -> None:
    present = find_gpu("rtx-4090").total_bytes
    tried: list[int] = []

    def compute(gpu: Gpu) -> EngineBudget:
        tried.append(gpu.total_bytes)
        refusal = "" if gpu.total_bytes >= least_gib * GIB else "no room"
        return EngineBudget(engine="vllm", num_tokens=7, kv_cache_bytes=GIB, refusal=refusal)

    budget = EngineBudget(engine="vllm", total_bytes=present, refusal="no room")
    (change,) = add_larger_gpu(budget, ServingOptions(), compute).changes
    sizes = sorted(gpu.total_bytes for gpu in list_suggested_gpus())
    expected = next(size for size in sizes if size > present and size >= least_gib * GIB)
    assert tried[0] == next(size for size in sizes if size > present)
    assert tried[-1] == find_gpu(change.flag.removeprefix("another GPU: ")).total_bytes == expected
    assert (change.num_tokens, change.kv_cache_bytes, change.cost) == (7, GIB, f"{expected / GIB:.0f} GiB")
