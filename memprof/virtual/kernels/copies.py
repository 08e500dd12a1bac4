"""Copies that CUDA kernels make of inputs, and the memory formats that determine whether a copy is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CONTIGUOUS = torch.contiguous_format


def contiguous(*tensors: torch.Tensor | None, layout: torch.memory_format = _CONTIGUOUS) -> list[int]:
    """Return the bytes of each copy that `Tensor.contiguous` makes of `tensors`; None is skipped."""
    strided = (t for t in tensors if t is not None and not t.is_contiguous(memory_format=layout))
    return [t.numel() * t.element_size() for t in strided]


def make_copies_formula(*positions: int) -> Callable[..., list[int]]:
    """Return the formula of an operator that makes contiguous copies of the arguments at `positions`."""

    def formula(args: Any, gpu: Any = None) -> list[int]:
        """Return the bytes of each contiguous copy of a tensor argument that is not contiguous."""
        selected = (args[position] for position in positions if position < len(args))
        return contiguous(*(arg for arg in selected if isinstance(arg, torch.Tensor)))

    return formula


def suggest_layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels-last if the strides of `tensor` are so, else contiguous (`Tensor::suggest_memory_format`)."""
    rank = tensor.dim()
    if rank not in (4, 5) or not _is_channels_last(tensor.size(), tensor.stride()):
        return _CONTIGUOUS
    return torch.channels_last if rank == 4 else torch.channels_last_3d


@functools.lru_cache(maxsize=4096)
def _is_channels_last(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether strides are channels-last, not ambiguous (c10/core/MemoryFormat.h, is_channels_last_strides)."""
    if not stride[1]:
        return False
    min_stride = 0
    for dim in (1, *range(len(size) - 1, 1, -1), 0):
        if not size[dim] or stride[dim] < min_stride or (dim == 0 and min_stride == stride[1]):
            return False
        min_stride = stride[dim] * size[dim]
    return True
