"""Copies and partial results that CUDA kernels take beside their outputs: bytes, in the order in which they are taken.

Like the rest of hidden.py's table, which refers to them; sources name the file of PyTorch below aten/src/ATen.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def contiguous(*tensors: torch.Tensor | None) -> list[int]:
    """Bytes of the copies that `Tensor.contiguous` makes of these tensors; None is no tensor."""
    return [t.numel() * t.element_size() for t in tensors if t is not None and not t.is_contiguous()]


def layer_norm_copy(args: Any) -> list[int]:
    """What is normalised, weight and bias are made contiguous (native/cuda/layer_norm_kernel.cu, layer_norm_cuda)."""
    return contiguous(args[0], *args[2:4])


def layer_norm_backward_copy(args: Any) -> list[int]:
    """The same in the backward (native/cuda/layer_norm_kernel.cu, layer_norm_backward_cuda)."""
    return contiguous(args[1], *args[5:7])


def layer_norm_backward_gradient(args: Any, num_sms: int) -> list[int]:
    """The gradient is made contiguous last, in the kernel's own function (LayerNormBackwardKernelImpl)."""
    return contiguous(args[0])


def convolution_copy(args: Any) -> list[int]:
    """The input of a one-dimensional convolution is made contiguous (native/Convolution.cpp, _convolution)."""
    return contiguous(args[0]) if args[0].dim() == 3 else []


def foreach_norm_partials(args: Any) -> list[int]:
    """A partial norm for every 65,536 elements, as many for each tensor as the largest has (ForeachReduceOp.cu)."""
    tensors = args[0]
    order = args[1] if len(args) > 1 else 2
    if order not in (1, 2, math.inf) or len({t.dtype for t in tensors}) != 1:
        return []
    chunks = max(-(-t.numel() // 65536) for t in tensors)
    return [max(4, tensors[0].element_size()) * len(tensors) * chunks] if chunks else []


def roll_copies(args: Any) -> list[int]:
    """One dimension after the other is rolled, from contiguous memory (native/cuda/TensorTransformations.cu)."""
    data = args[0]
    shifts = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return contiguous(data) + [data.numel() * data.element_size()] * (len(shifts) - 1)


def upsample_backward_gradient(args: Any, num_sms: int) -> list[int]:
    """The gradient is made contiguous, but not from channels last (native/cuda/UpSampleNearest2d.cu)."""
    gradient = args[0]
    if gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last):
        return []
    return contiguous(gradient)
