"""Copies that CUDA kernels make of inputs, and the memory formats that determine whether a copy is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CONTIGUOUS = torch.contiguous_format


def copy_bytes(*tensors: torch.Tensor | None, layout: torch.memory_format = _CONTIGUOUS) -> list[int]:
    """Return the bytes of each copy that `contiguous(memory_format=layout)` creates of `tensors`; None is skipped."""
    non_contiguous = (t for t in tensors if t is not None and not t.is_contiguous(memory_format=layout))
    return [t.numel() * t.element_size() for t in non_contiguous]


def make_copies_formula(*positions: int) -> Callable[..., list[int]]:
    """Return a scratch formula: the bytes of the contiguous copies of the operator's arguments at `positions`."""

    def formula(args: Any, gpu: Any = None) -> list[int]:
        """Return the bytes of each copy that an operator with these arguments creates of non-contiguous tensors."""
        selected = (args[position] for position in positions if position < len(args))
        return copy_bytes(*(arg for arg in selected if isinstance(arg, torch.Tensor)))

    return formula


def suggest_layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels-last if `tensor` has such strides, else contiguous format (`Tensor::suggest_memory_format`)."""
    rank = tensor.dim()
    if rank not in (4, 5) or not _is_channels_last(tensor.size(), tensor.stride()):
        return _CONTIGUOUS
    return torch.channels_last if rank == 4 else torch.channels_last_3d


@functools.lru_cache(maxsize=4096)
def _is_channels_last(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether `stride` is channels-last and not also contiguous (c10's is_channels_last_strides)."""
    if not stride[1]:
        return False
    min_stride = 0
    for dim in (1, *range(len(size) - 1, 1, -1), 0):
        if not size[dim] or stride[dim] < min_stride or (dim == 0 and min_stride == stride[1]):
            return False
        min_stride = stride[dim] * size[dim]
    return True
