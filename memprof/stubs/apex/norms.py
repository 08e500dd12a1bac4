"""apex.normalization: layer norm and RMS norm in one kernel.

Sources: apex/normalization/fused_layer_norm.py, csrc/layer_norm_cuda.cpp and csrc/layer_norm_cuda_kernel.cu of
NVIDIA/apex@25.05. Outside autograd.Function the operators return statistics too, whose gradients are zeros.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memprof.stubs.registry import register_in
from memprof.stubs.tools import HALF, autocast_dtype, check_on_gpu, kernel

_MODULE = "apex.normalization.fused_layer_norm"
_SOURCE = "NVIDIA/apex@25.05:apex/normalization/fused_layer_norm.py, csrc/layer_norm_cuda_kernel.cu"
_NUM_PARTS = 16  # partial gradients of weight and bias, which are then summed (part_size)
_register = register_in(_MODULE, source=_SOURCE)
_register_public = register_in(_MODULE, "apex.normalization", source=_SOURCE)


def _norm(
    input: torch.Tensor, shape, weight, bias, *, is_rms: bool, memory_efficient: bool, is_mixed: bool = False
) -> torch.Tensor:
    """Run a layer norm or RMS norm, with or without weight and bias.

    Saves the input (the output if `memory_efficient`), the parameters, and one or two statistics per row.
    """
    check_on_gpu("apex.fused_layer_norm", input)
    if tuple(input.shape[input.dim() - len(shape) :]) != tuple(shape):
        expected, actual = list(shape), list(input.shape)
        raise RuntimeError(
            f"apex: given normalized_shape={expected}, an input whose shape ends so is expected, not {actual}"
        )

    def forward(x: torch.Tensor, weight, bias):
        x = x.contiguous()
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        rows = x.shape[: x.dim() - len(shape)].numel()
        output = torch.empty_like(x, dtype=weight.dtype if is_mixed else None)
        dtype = torch.float32 if x.dtype in HALF else x.dtype
        statistics = [x.new_empty(rows, dtype=dtype) for _ in range(1 if is_rms else 2)]
        saved_rows = output if memory_efficient else x
        saved = (saved_rows, weight, bias, *([statistics[-1]] if memory_efficient else statistics))
        return (output if is_mixed else (output, *statistics)), saved

    def backward(saved, gradient: torch.Tensor, *statistics_gradients):
        rows, weight, bias = saved[:3]
        gradient = gradient.contiguous()
        gradients = [None if t is None else torch.empty_like(t) for t in (rows, weight, bias)]
        sums, dtype = (_NUM_PARTS, torch.Size(shape).numel()), torch.float32 if rows.dtype in HALF else rows.dtype
        parts = [None if t is None else rows.new_empty(sums, dtype=dtype) for t in gradients[1:]]
        del parts
        return tuple(gradients)

    # To autocast's dtype, where it is on (apex/_autocast_utils.py).
    inputs = [None if t is None else t.to(autocast_dtype(t.dtype)) for t in (input, weight, bias)]
    with torch.amp.autocast("cuda", enabled=False):
        output = kernel(forward, backward, *inputs)
    return output if is_mixed else output[0]


@_register
def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    """Return the layer norm; saves mean and variance of each row in float32; 16 partial gradients of each parameter."""
    return _norm(input, normalized_shape, weight, bias, is_rms=False, memory_efficient=memory_efficient)


@_register
def fused_layer_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
    """Return the layer norm; saves mean and variance of each row in float32."""
    return _norm(input, normalized_shape, None, None, is_rms=False, memory_efficient=memory_efficient)


@_register
def mixed_dtype_fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    """Return the layer norm in the dtype of the weight; allocates as fused_layer_norm_affine does."""
    return _norm(input, normalized_shape, weight, bias, is_rms=False, memory_efficient=memory_efficient, is_mixed=True)


@_register
def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    """Return the RMS norm; saves one float32 statistic per row; 16 partial gradients of the weight."""
    return _norm(input, normalized_shape, weight, None, is_rms=True, memory_efficient=memory_efficient)


@_register
def fused_rms_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
    """Return the RMS norm; saves one float32 statistic per row."""
    return _norm(input, normalized_shape, None, None, is_rms=True, memory_efficient=memory_efficient)


@_register
def mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    """Return the RMS norm in the dtype of the weight; allocates as fused_rms_norm_affine does."""
    return _norm(input, normalized_shape, weight, None, is_rms=True, memory_efficient=memory_efficient, is_mixed=True)


@_register
def manual_rms_norm(input, normalized_shape, weight, eps):
    """Return the RMS norm by PyTorch's own operators, as apex does for host tensors and in compiled code."""
    dims = tuple(range(-len(normalized_shape), 0))
    variance = input.to(torch.float32).pow(2).mean(dims, keepdim=True)
    input = input * torch.rsqrt(variance + eps)
    if weight is None:
        return input
    if weight.dtype in HALF:
        input = input.to(weight.dtype)
    return weight * input


class _ApexNorm(nn.Module):
    """The base of Apex's norm layers: layer norm or RMS norm, with the output in the input's or weight's dtype."""

    is_rms = False
    is_mixed = False
    weight: Any
    bias: Any

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False) -> None:
        super().__init__()
        shape: Any = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else normalized_shape
        self.normalized_shape = torch.Size(shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in ("weight",) if self.is_rms else ("weight", "bias"):
            parameter = nn.Parameter(torch.empty(*shape)) if elementwise_affine else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.ones_(self.weight)
            if not self.is_rms:
                nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"

    def forward(self, input):
        """Return the norm of `input`: by the kernel on a GPU, else (or in compiled code) by PyTorch's operators."""
        is_traced = torch.jit.is_tracing() or torch.jit.is_scripting()  # type: ignore[attr-defined]
        if is_traced or not input.is_cuda or (torch.compiler.is_compiling() and not self.is_mixed):
            if self.is_rms:
                return manual_rms_norm(input, self.normalized_shape, self.weight, self.eps)
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return _norm(
            input, self.normalized_shape, self.weight, None if self.is_rms else self.bias, is_rms=self.is_rms,
            memory_efficient=self.memory_efficient, is_mixed=self.is_mixed,
        )  # fmt: skip


@_register_public
class FusedLayerNorm(_ApexNorm):
    """A layer norm that saves its input (its output if `memory_efficient`), and mean and variance in float32."""


@_register_public
class FusedRMSNorm(_ApexNorm):
    """An RMS norm that saves its input (its output if `memory_efficient`), and one float32 statistic per row."""

    is_rms = True


class _MixedNorm(_ApexNorm):
    is_mixed = True

    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **kwargs) -> None:
        if not kwargs.pop("elementwise_affine", True):
            raise RuntimeError("Mixed norms of Apex do not support `elementwise_affine = False`")
        super().__init__(normalized_shape, eps, True, memory_efficient)


@_register_public
class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """A FusedLayerNorm whose output has the dtype of its weight."""


@_register_public
class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """A FusedRMSNorm whose output has the dtype of its weight."""
