"""Copies that CUDA kernels make of their inputs, and the memory formats that decide whether they do.

Part of the table of hidden.py, like the other files by kind of kernel; sources name the file below aten/src/ATen.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from memprof.virtual.card import Card

_aten = torch.ops.aten
_CONTIGUOUS = torch.contiguous_format


def contiguous(*tensors: torch.Tensor | None) -> list[int]:
    """Bytes of the copies that `Tensor.contiguous` makes of these tensors; None is no tensor."""
    return [t.numel() * t.element_size() for t in tensors if t is not None and not t.is_contiguous()]


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


def roll(args: Any) -> list[int]:
    """One dimension is rolled from contiguous memory (native/cuda/TensorTransformations.cu); for more, selection.py."""
    return contiguous(args[0])


_FEWEST_CHANNELS_LAST = 4
"""With fewer channels nearest upsampling has no kernel for channels-last (native/cuda/UpSampleNearest2d.cu)."""


def _upsample(source: torch.Tensor, spatial: Any) -> list[int]:
    """The copy of `source`, and before it a contiguous result where the result (of this spatial size) is none."""
    result = (*source.shape[:2], *spatial)
    if tuple(source.shape) == result or not source.numel():
        return []
    if suggested_format(source) is _CONTIGUOUS:
        return contiguous(source)
    if source.shape[1] < _FEWEST_CHANNELS_LAST:
        return [math.prod(result) * source.element_size(), *contiguous(source)]
    dense = source.is_contiguous(memory_format=torch.channels_last)
    return [] if dense else [source.numel() * source.element_size()]


def upsample_nearest2d(args: Any, card: Card) -> list[int]:
    """Nearest upsampling works on contiguous or channels-last images (native/cuda/UpSampleNearest2d.cu)."""
    return _upsample(args[0], args[1])


def upsample_nearest2d_backward(args: Any, card: Card) -> list[int]:
    """So does its backward, whose result is as large as the input was."""
    return _upsample(args[0], args[2][-2:])


INPUT_COPIES: dict[Any, Any] = {_aten.roll: roll}
TEMPORARIES: dict[Any, Any] = {
    _aten.upsample_nearest2d: upsample_nearest2d,
    _aten._upsample_nearest_exact2d: upsample_nearest2d,
    _aten.upsample_nearest2d_backward: upsample_nearest2d_backward,
    _aten._upsample_nearest_exact2d_backward: upsample_nearest2d_backward,
}
