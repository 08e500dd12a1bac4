"""Copies that CUDA kernels make of their inputs, and the memory formats that decide whether they do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CONTIGUOUS = torch.contiguous_format


def contiguous(*tensors: torch.Tensor | None, layout: torch.memory_format = _CONTIGUOUS) -> list[int]:
    """Bytes of the copies that `Tensor.contiguous` makes of these tensors; None is no tensor."""
    others = (t for t in tensors if t is not None and not t.is_contiguous(memory_format=layout))
    return [t.numel() * t.element_size() for t in others]


def copies_of(*positions: int) -> Callable[..., list[int]]:
    """Return the formula of an operator that makes contiguous copies of the tensors among these arguments."""

    def formula(args: Any, gpu: Any = None) -> list[int]:
        """The output; contiguous copies of tensors that it is given, where they are not."""
        given = (args[position] for position in positions if position < len(args))
        return contiguous(*(arg for arg in given if isinstance(arg, torch.Tensor)))

    return formula


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """`Tensor::suggest_memory_format`: channels-last where the strides say so."""
    rank = tensor.dim()
    if rank not in (4, 5) or not _channels_last(tensor.size(), tensor.stride()):
        return _CONTIGUOUS
    return torch.channels_last if rank == 4 else torch.channels_last_3d


@functools.lru_cache(maxsize=4096)
def _channels_last(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """c10/core/MemoryFormat.h, is_channels_last_strides: in doubt (one channel, one position) not."""
    if not stride[1]:
        return False
    least = 0
    for dim in (1, *range(len(size) - 1, 1, -1), 0):
        if not size[dim] or stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * size[dim]
    return True
