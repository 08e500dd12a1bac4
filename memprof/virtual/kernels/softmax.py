"""Softmax and its logarithm: the copies and products of their kernels (native/cuda/SoftMax.cu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import composite, scratch
from memprof.virtual.machine import Machine

_aten = torch.ops.aten


@scratch("aten._safe_softmax")
def safe_softmax(args: Any, card: Card) -> list[int]:
    """The boolean mask of -inf scores and of rows without any (native/transformers/attention.cpp, _safe_softmax)."""
    scores, dim = args[0], args[1]
    return [scores.numel(), scores.numel() // max(1, scores.shape[dim] if scores.dim() else 1)]


@scratch(_aten._softmax, _aten._log_softmax)
def softmax(args: Any, card: Card) -> list[int]:
    """A contiguous copy of the input, where it is none (native/cuda/SoftMax.cu, host_softmax)."""
    return contiguous(args[0])


@scratch(_aten._log_softmax_backward_data)
def log_softmax_backward(args: Any, card: Card) -> list[int]:
    """Contiguous copies of gradient and output, such as of an expanded gradient (SoftMax.cu, host_softmax_backward)."""
    return contiguous(args[0], args[1])


@scratch(_aten._softmax_backward_data)
def softmax_backward(args: Any, card: Card) -> list[int]:
    """The product of gradient and output, as large as the output (native/cuda/SoftMax.cu, softmax_backward_cuda_out).

    It is laid out as its factors are; then it and the output are made contiguous.
    """
    product = args[0] * args[1]
    return [product.numel() * product.element_size(), *contiguous(product, args[1])]


def _without_copy(func: Callable[..., torch.Tensor], operator: Any) -> None:
    @composite(func)
    def softmax(
        machine: Machine, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """From float16 to float32 without a copy, which CUDA's kernel does and others do not (native/SoftMax.cpp)."""
        if dtype is torch.float32 and input.dtype is torch.float16 and not kwargs and machine.is_on_card(input):
            return operator(input, dim, True)
        return NotImplemented


for _func in (torch.softmax, torch.Tensor.softmax, torch.special.softmax):
    _without_copy(_func, _aten._softmax)
for _func in (torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax):
    _without_copy(_func, _aten._log_softmax)
