"""What dropout and softmax allocate on a GPU: results and masks, in order and by type, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels.activations import compute_log_softmax_backward_scratch, compute_softmax_backward_scratch

GPU_8_9 = DeviceProperties((8, 9), 128, 1536, (2, 11))


def made(gpu: VirtualGpu, run: Callable[[torch.Tensor], Any], dtype: torch.dtype) -> list[tuple[str, int]]:
    x = torch.ones(10, 100, device="cuda", dtype=dtype)
    first = len(gpu.trace.storages)
    run(x)
    return [(storage.dtype, storage.num_bytes) for storage in gpu.trace.storages[first:]]


FLOAT, HALF = torch.float32, torch.bfloat16
MASK = ("bool", 1000)


@pytest.mark.parametrize(
    ("run", "dtype", "expected"),
    [
        # A byte for each element, first, and then the result.
        (lambda x: torch.dropout(x, 0.5, True), FLOAT, [MASK, ("float32", 4000)]),
        (lambda x: torch.dropout(x, 0.001, True), HALF, [MASK, ("bfloat16", 2000)]),
        (lambda x: F.dropout(x, 0.999), FLOAT, [MASK, ("float32", 4000)]),
        (lambda x: torch.native_dropout(x, 0.5, True), HALF, [MASK, ("bfloat16", 2000)]),
        (lambda x: torch.dropout(x, 0.0, True), FLOAT, []),
        (lambda x: torch.dropout(x, 0.5, False), FLOAT, []),
        (lambda x: torch.dropout(x[:0], 0.5, True), FLOAT, []),
        # Of what is dropped in whole there is no mask: a zero, and the product with it.
        (lambda x: torch.dropout(x, 1.0, True), FLOAT, [("float32", 4), ("float32", 4000)]),
        # The buffer of log-sigmoid is the CPU's alone.
        (F.logsigmoid, FLOAT, [("float32", 4000)]),
        # float16 is read as it is; of bfloat16 a copy in float32 is made first.
        (lambda x: torch.softmax(x, -1, dtype=torch.float32), torch.float16, [("float32", 4000)]),
        (lambda x: torch.log_softmax(x, 1, dtype=torch.float32), torch.float16, [("float32", 4000)]),
        (lambda x: torch.softmax(x, -1, dtype=torch.float32), HALF, 2 * [("float32", 4000)]),
        (lambda x: torch.softmax(x, -1, dtype=torch.float64), torch.float16, 2 * [("float64", 8000)]),
        (lambda x: torch.softmax(x, -1), torch.float16, [("float16", 2000)]),
    ],
)
def test_results_and_masks(gpu, run, dtype, expected) -> None:
    assert made(gpu, run, dtype) == expected


def test_a_mask_is_kept_for_the_backward(gpu) -> None:
    x = torch.ones(10, 100, device="cuda", requires_grad=True)
    before = gpu.recorder.storages.live_bytes
    y = F.dropout(x)
    assert gpu.recorder.storages.live_bytes - before == 4000 + 1000
    y.sum().backward()
    del y
    assert gpu.recorder.storages.live_bytes - before == 4000  # the gradient


def test_on_the_cpu_dropout_is_torchs_own(gpu) -> None:
    assert F.dropout(torch.ones(3), 0.5).device.type == "cpu"


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def test_backward_copies_what_is_not_contiguous() -> None:
    gradient, output = empty(8, 4), empty(8, 4)
    turned = empty(4, 8).t()
    assert compute_log_softmax_backward_scratch((gradient, output), GPU_8_9) == []
    assert compute_log_softmax_backward_scratch((turned, output), GPU_8_9) == [128]
    assert compute_log_softmax_backward_scratch((gradient, turned), GPU_8_9) == [128]
    # Of softmax the product of both, and copies of it and of the output.
    assert compute_softmax_backward_scratch((gradient, output), GPU_8_9) == [128]
    assert compute_softmax_backward_scratch((turned, turned), GPU_8_9) == [128, 128, 128]
