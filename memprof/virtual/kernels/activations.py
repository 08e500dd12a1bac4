"""Softmax, log-sigmoid and dropout: copies that their CUDA kernels create, and masks saved for the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes, make_copies_formula
from memprof.virtual.kernels.registry import aten, composite, kernel, scratch


@scratch("aten._safe_softmax")
def compute_safe_softmax_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the temporaries of `_safe_softmax`: a mask of -inf scores, a mask of rows with only -inf
    scores, and a scalar zero (native/transformers/attention.cpp)."""
    scores, dim = args[0], args[1]
    rows = scores.numel() // max(1, scores.shape[dim] if scores.dim() else 1)
    return [scores.numel(), rows, scores.element_size()]


# native/cuda/SoftMax.cu, host_softmax and host_softmax_backward
compute_softmax_scratch = scratch(aten._softmax, aten._log_softmax)(make_copies_formula(0))
compute_log_softmax_backward_scratch = scratch(aten._log_softmax_backward_data)(make_copies_formula(0, 1))


@scratch(aten._softmax_backward_data)
def compute_softmax_backward_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the product of gradient and output, and of contiguous copies of the product and the output
    (native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    # The product has the strides of its factors.
    product = args[0] * args[1]
    return [product.numel() * product.element_size(), *copy_bytes(product, args[1])]


def _softmax_half_to_float(
    operator: Any,
    device_state: DeviceState,
    input: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Any:
    """Run a softmax of float16 `input` with float32 result without a converted copy, as on CUDA (SoftMax.cpp)."""
    if dtype is torch.float32 and input.dtype is torch.float16 and not kwargs and device_state.is_on_gpu(input):
        return operator(input, dim, True)
    return NotImplemented


composite(torch.softmax, torch.Tensor.softmax, torch.special.softmax)(partial(_softmax_half_to_float, aten._softmax))
composite(torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax)(
    partial(_softmax_half_to_float, aten._log_softmax)
)


@kernel(aten.log_sigmoid_forward)
def log_sigmoid_forward(launch: KernelContext) -> Any:
    """Allocate the result and the buffer for the backward pass, which is empty on CUDA (native/cuda/Activation.cpp)."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    result = (torch.empty_like(data), data.new_empty(0))
    launch.record(*result)
    return result


@composite(torch.dropout)
def dropout(device_state: DeviceState, input: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """Run `torch.dropout` with a boolean mask; on other devices the mask has the dtype of `input` (cuda/Dropout.cu)."""
    if not (train and 0 < p < 1 and input.numel() and device_state.is_on_gpu(input)):
        return NotImplemented
    device_state.values.assume("Dropout keeps a boolean mask (CUDA's native_dropout).")
    return aten.native_dropout(input, p, train)[0]


@kernel(aten.native_dropout, on_host=True)
def native_dropout(launch: KernelContext) -> Any:
    """Allocate the boolean mask, then the result (dropout_cuda); the meta kernel's mask has the input's dtype."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    result, mask = torch.empty_like(data), torch.empty_like(data, dtype=torch.bool)
    launch.record(mask, result)
    return result, mask
