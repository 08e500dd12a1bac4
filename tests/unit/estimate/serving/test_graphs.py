"""CUDA graphs that vLLM captures, and what its profiler counts for them."""

from __future__ import annotations

import pytest

from memprof.device.catalog import find_gpu
from memprof.estimate.serving.graphs import estimate_graph_bytes, list_capture_sizes
from memprof.estimate.serving.lookup import load_served_model
from memprof.units import MIB


@pytest.mark.parametrize(("seqs", "sizes", "largest"), [(2, 3, 4), (8, 5, 16), (20, 8, 40), (256, 51, 512)])
def test_sizes_as_logs_print_them(seqs: int, sizes: int, largest: int) -> None:
    found = list_capture_sizes(seqs, 8192)
    assert (len(found), found[-1]) == (sizes, largest)


def test_few_graphs_still_have_the_first() -> None:
    model, gpu = load_served_model("qwen2.5-7b"), find_gpu("rtx-4090")
    few, many = (estimate_graph_bytes(model, gpu, "auto", seqs, 8192) for seqs in (8, 256))
    assert many - few == (51 + 35 - 5 - 4) * MIB
    assert few > 100 * MIB
