"""Activation functions and dropout: what their kernels copy, and what they keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import contiguous, copies_of
from memprof.virtual.kernels.registry import aten, composite, kernel, scratch


@scratch("aten._safe_softmax")
def safe_softmax(args: Any, gpu: DeviceProperties) -> list[int]:
    """The boolean mask of -inf scores, that of rows without any, and a zero (native/transformers/attention.cpp)."""
    scores, dim = args[0], args[1]
    rows = scores.numel() // max(1, scores.shape[dim] if scores.dim() else 1)
    return [scores.numel(), rows, scores.element_size()]


# native/cuda/SoftMax.cu, host_softmax and host_softmax_backward
softmax = scratch(aten._softmax, aten._log_softmax)(copies_of(0))
log_softmax_backward = scratch(aten._log_softmax_backward_data)(copies_of(0, 1))


@scratch(aten._softmax_backward_data)
def softmax_backward(args: Any, gpu: DeviceProperties) -> list[int]:
    """The product of gradient and output, as large as the output (native/cuda/SoftMax.cu, softmax_backward_cuda_out).

    It is laid out as its factors are; then it and the output are made contiguous.
    """
    product = args[0] * args[1]
    return [product.numel() * product.element_size(), *contiguous(product, args[1])]


def _without_copy(
    operator: Any, machine: DeviceState, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any
) -> Any:
    """Convert float16 to float32 without a copy, as CUDA's kernel does and others do not (native/SoftMax.cpp)."""
    if dtype is torch.float32 and input.dtype is torch.float16 and not kwargs and machine.is_on_gpu(input):
        return operator(input, dim, True)
    return NotImplemented


composite(torch.softmax, torch.Tensor.softmax, torch.special.softmax)(partial(_without_copy, aten._softmax))
composite(torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax)(
    partial(_without_copy, aten._log_softmax)
)


@kernel(aten.log_sigmoid_forward)
def log_sigmoid_forward(launch: KernelContext) -> Any:
    """The buffer for the backward is empty on CUDA (native/cuda/Activation.cpp); the CPU fills one."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    result = (torch.empty_like(data), data.new_empty(0))
    launch.record(*result)
    return result


@composite(torch.dropout)
def dropout(machine: DeviceState, input: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """`torch.dropout`, whose generic path keeps a mask in the input's dtype (native/cuda/Dropout.cu)."""
    if not (train and 0 < p < 1 and input.numel() and machine.is_on_gpu(input)):
        return NotImplemented
    machine.values.assume("Dropout keeps a boolean mask (CUDA's native_dropout).")
    return aten.native_dropout(input, p, train)[0]


@kernel(aten.native_dropout, on_host=True)
def native_dropout(launch: KernelContext) -> Any:
    """The mask and the result, in this order (dropout_cuda); the meta kernel would keep one in the input's dtype."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    result, mask = torch.empty_like(data), torch.empty_like(data, dtype=torch.bool)
    launch.record(mask, result)
    return result, mask
