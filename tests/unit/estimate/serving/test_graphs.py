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


@pytest.mark.parametrize(
    ("gpu", "dtype", "has_loras", "num_bytes"),
    [
        # 28 layers; 5 sizes of piecewise graphs and 4 of full ones, of which the first two are in 16 MiB.
        ("rtx-4090", "fp8", False, 16 + 6 * 28 + 7),
        ("rtx-4090", "auto", False, 16 + 6 * 28 + 7),
        ("h100-80gb", "auto", False, 16 + 24 * 28 + 7),
        ("b200", "fp8", False, 16 + 6 * 28 + 7),
        ("rtx-4090", "auto", True, 16 + 6 * 28 + 16),
        ("rtx-5090", "auto", False, 16 + 6 * 28 + 7),
        *(("rtx-5090", dtype, False, 4 * round(4.8 * 1024 * MIB / 35) / MIB)
          for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")),
    ],
)  # fmt: skip
def test_graphs_by_hand(gpu: str, dtype: str, has_loras: bool, num_bytes: float) -> None:
    model = load_served_model("qwen2.5-7b")
    assert estimate_graph_bytes(model, find_gpu(gpu), dtype, 8, 8192, has_loras=has_loras) / MIB == num_bytes


def test_no_graph_has_more_tokens_than_a_step() -> None:
    assert list_capture_sizes(256, 64)[-1] == list_capture_sizes(32, 8192)[-1] == 64


def test_sizes_of_graphs() -> None:
    """1, 2, 4, each eighth up to 256, and each sixteenth from there on, of twice as many tokens as requests."""
    assert list_capture_sizes(8, 8192) == [1, 2, 4, 8, 16]
    assert list_capture_sizes(150, 8192)[-5:] == [240, 248, 256, 272, 288]
