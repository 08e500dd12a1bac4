"""apex.normalization: layer norm and RMS norm in one kernel.

Sources: apex/normalization/fused_layer_norm.py, csrc/layer_norm_cuda.cpp and csrc/layer_norm_cuda_kernel.cu of
NVIDIA/apex@25.05. Outside autograd.Function the operators return their statistics too, whose gradients are zeros.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memprof.stand_ins.registry import stand_in
from memprof.stand_ins.tools import kernel, on_card

_MODULE = "apex.normalization.fused_layer_norm"
_SOURCE = "NVIDIA/apex@25.05:apex/normalization/fused_layer_norm.py, csrc/layer_norm_cuda_kernel.cu"
_PARTS = 16
"""Of the gradients of weight and bias, summed in the end (part_size)."""


def _inner(name: str) -> Callable[[Any], Any]:
    return stand_in(f"{_MODULE}.{name}", source=_SOURCE)


def _public(name: str) -> Callable[[Any], Any]:
    return stand_in(f"{_MODULE}.{name}", f"apex.normalization.{name}", source=_SOURCE)


def _float(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _norm(
    input: torch.Tensor, shape: Any, weight: Any, bias: Any, *, is_rms: bool, thrifty: bool, mixed: bool = False
) -> torch.Tensor:
    """One of the eight functions: with a weight or without, by mean and variance or by the latter alone.

    Saved are the input, or if memory is to be saved the output, the parameters, and a number a row, or two.
    """
    on_card("apex.fused_layer_norm", input)
    if tuple(input.shape[input.dim() - len(shape) :]) != tuple(shape):
        wanted, got = list(shape), list(input.shape)
        raise RuntimeError(
            f"apex: given normalized_shape={wanted}, an input whose shape ends so is expected, not {got}"
        )

    def forward(x: torch.Tensor, scale: Any, shift: Any) -> Any:
        x = x.contiguous()
        scale, shift = (None if one is None else one.contiguous() for one in (scale, shift))
        rows = x.shape[: x.dim() - len(shape)].numel()
        output = torch.empty_like(x, dtype=scale.dtype if mixed else None)
        statistics = [x.new_empty(rows, dtype=_float(x.dtype)) for _ in range(1 if is_rms else 2)]
        kept = output if thrifty else x
        saved = (kept, scale, shift, *([statistics[-1]] if thrifty else statistics))
        return (output if mixed else (output, *statistics)), saved

    def backward(saved: Any, gradient: torch.Tensor, *of_statistics: Any) -> Any:
        kept, scale, shift = saved[:3]
        gradient = gradient.contiguous()
        made = torch.empty_like(kept)
        of_parameters = [None if one is None else torch.empty_like(one) for one in (scale, shift)]
        number = sum(one is not None for one in (scale, shift))
        columns = torch.Size(shape).numel()
        parts = [kept.new_empty((_PARTS, columns), dtype=_float(kept.dtype)) for _ in range(number)]
        del parts
        return made, *of_parameters

    given = _cast(input, weight, bias)
    with torch.amp.autocast("cuda", enabled=False):
        output = kernel(forward, backward, *given)
    return output if mixed else output[0]


def _cast(*tensors: Any) -> list[Any]:
    """To autocast's type, where it is on (apex/_autocast_utils.py)."""
    if not torch.is_autocast_enabled():
        return list(tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return [None if one is None else one.to(dtype) for one in tensors]


@_inner("fused_layer_norm_affine")
def fused_layer_norm_affine(
    input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: Any = 1e-6, memory_efficient: Any = False
) -> Any:
    """Mean and variance of each row, saved in float32; gradients of weight and bias in 16 parts."""
    return _norm(input, normalized_shape, weight, bias, is_rms=False, thrifty=memory_efficient)


@_inner("fused_layer_norm")
def fused_layer_norm(input: Any, normalized_shape: Any, eps: Any = 1e-6, memory_efficient: Any = False) -> Any:
    """Mean and variance of each row, saved in float32."""
    return _norm(input, normalized_shape, None, None, is_rms=False, thrifty=memory_efficient)


@_inner("mixed_dtype_fused_layer_norm_affine")
def mixed_dtype_fused_layer_norm_affine(
    input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: Any = 1e-6, memory_efficient: Any = False
) -> Any:
    """As fused_layer_norm_affine, with an output in the type of the weight."""
    return _norm(input, normalized_shape, weight, bias, is_rms=False, thrifty=memory_efficient, mixed=True)


@_inner("fused_rms_norm_affine")
def fused_rms_norm_affine(
    input: Any, weight: Any, normalized_shape: Any, eps: Any = 1e-6, memory_efficient: Any = False
) -> Any:
    """A number of each row, saved in float32; the gradient of the weight in 16 parts."""
    return _norm(input, normalized_shape, weight, None, is_rms=True, thrifty=memory_efficient)


@_inner("fused_rms_norm")
def fused_rms_norm(input: Any, normalized_shape: Any, eps: Any = 1e-6, memory_efficient: Any = False) -> Any:
    """A number of each row, saved in float32."""
    return _norm(input, normalized_shape, None, None, is_rms=True, thrifty=memory_efficient)


@_inner("mixed_dtype_fused_rms_norm_affine")
def mixed_dtype_fused_rms_norm_affine(
    input: Any, weight: Any, normalized_shape: Any, eps: Any = 1e-6, memory_efficient: Any = False
) -> Any:
    """As fused_rms_norm_affine, with an output in the type of the weight."""
    return _norm(input, normalized_shape, weight, None, is_rms=True, thrifty=memory_efficient, mixed=True)


@_inner("manual_rms_norm")
def manual_rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    """PyTorch's own operators, for tensors of the host and code that is compiled."""
    dims = tuple(range(-len(normalized_shape), 0))
    variance = input.to(torch.float32).pow(2).mean(dims, keepdim=True)
    input = input * torch.rsqrt(variance + eps)
    if weight is None:
        return input
    if weight.dtype in (torch.float16, torch.bfloat16):
        input = input.to(weight.dtype)
    return weight * input


class _Norm(nn.Module):
    has_bias = True
    weight: Any
    bias: Any

    def _build(self, normalized_shape: Any, eps: Any, elementwise_affine: Any, memory_efficient: Any) -> None:
        super().__init__()
        shape: Any = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else normalized_shape
        self.normalized_shape = torch.Size(shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            parameter = nn.Parameter(torch.empty(*shape)) if elementwise_affine else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        if self.elementwise_affine:
            nn.init.ones_(self.weight)
            if self.has_bias:
                nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


def _is_plain(input: torch.Tensor) -> bool:
    traced = torch.jit.is_tracing() or torch.jit.is_scripting()  # type: ignore[attr-defined]
    return traced or not input.is_cuda


@_public("FusedLayerNorm")
class FusedLayerNorm(_Norm):
    """By mean and variance, saved in float32; `memory_efficient` saves the output, not the input."""

    def __init__(
        self, normalized_shape: Any, eps: Any = 1e-5, elementwise_affine: Any = True, memory_efficient: Any = False
    ) -> None:
        self._build(normalized_shape, eps, elementwise_affine, memory_efficient)

    def forward(self, input: Any) -> Any:
        """The kernel on a card, unless the code is compiled."""
        if _is_plain(input) or torch.compiler.is_compiling():
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        weight, bias = (self.weight, self.bias) if self.elementwise_affine else (None, None)
        return _norm(input, self.normalized_shape, weight, bias, is_rms=False, thrifty=self.memory_efficient)


@_public("FusedRMSNorm")
class FusedRMSNorm(_Norm):
    """By the root of the mean of squares, saved in float32; `memory_efficient` saves the output, not the input."""

    has_bias = False

    def __init__(
        self, normalized_shape: Any, eps: Any = 1e-5, elementwise_affine: Any = True, memory_efficient: Any = False
    ) -> None:
        self._build(normalized_shape, eps, elementwise_affine, memory_efficient)

    def forward(self, input: Any) -> Any:
        """The kernel on a card, unless the code is compiled."""
        if _is_plain(input) or torch.compiler.is_compiling():
            return manual_rms_norm(input, self.normalized_shape, self.weight, self.eps)
        weight = self.weight if self.elementwise_affine else None
        return _norm(input, self.normalized_shape, weight, None, is_rms=True, thrifty=self.memory_efficient)


@_public("MixedFusedLayerNorm")
class MixedFusedLayerNorm(FusedLayerNorm):
    """As FusedLayerNorm, with an output in the type of its weight."""

    def __init__(self, normalized_shape: Any, eps: Any = 1e-5, *, memory_efficient: Any = False, **kwargs: Any) -> None:
        _always_affine(kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Any) -> Any:
        """The kernel on a card."""
        if _is_plain(input):
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        shape, thrifty = self.normalized_shape, self.memory_efficient
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, shape, self.eps, thrifty)


@_public("MixedFusedRMSNorm")
class MixedFusedRMSNorm(FusedRMSNorm):
    """As FusedRMSNorm, with an output in the type of its weight."""

    def __init__(self, normalized_shape: Any, eps: Any = 1e-5, *, memory_efficient: Any = False, **kwargs: Any) -> None:
        _always_affine(kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Any) -> Any:
        """The kernel on a card."""
        if _is_plain(input):
            return manual_rms_norm(input, self.normalized_shape, self.weight, self.eps)
        shape, thrifty = self.normalized_shape, self.memory_efficient
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, shape, self.eps, thrifty)


def _always_affine(options: dict[str, Any]) -> None:
    if not options.pop("elementwise_affine", True):
        raise RuntimeError("Mixed norms of Apex do not support `elementwise_affine = False`")
