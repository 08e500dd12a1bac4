"""Upsampling: its copies to and from channels-last."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous, suggested_format
from memprof.virtual.kernels.registry import scratch

_aten = torch.ops.aten

_FEWEST_CHANNELS_LAST = 4
"""With fewer channels nearest upsampling has no kernel for channels-last (native/cuda/UpSampleNearest2d.cu)."""


def _upsample(source: torch.Tensor, spatial: Any) -> list[int]:
    """The copy of `source`, and before it a contiguous result where the result (of this spatial size) is none."""
    result = (*source.shape[:2], *spatial)
    if tuple(source.shape) == result or not source.numel():
        return []
    if suggested_format(source) is torch.contiguous_format:
        return contiguous(source)
    if source.shape[1] < _FEWEST_CHANNELS_LAST:
        return [math.prod(result) * source.element_size(), *contiguous(source)]
    dense = source.is_contiguous(memory_format=torch.channels_last)
    return [] if dense else [source.numel() * source.element_size()]


@scratch(_aten.upsample_nearest2d, _aten._upsample_nearest_exact2d)
def upsample_nearest2d(args: Any, card: Card) -> list[int]:
    """Nearest upsampling works on contiguous or channels-last images (native/cuda/UpSampleNearest2d.cu)."""
    return _upsample(args[0], args[1])


@scratch(
    _aten.upsample_nearest2d_backward, _aten._upsample_nearest_exact2d_backward, _aten.upsample_bilinear2d_backward
)
def upsample_2d_backward(args: Any, card: Card) -> list[int]:
    """So does its backward, whose result is as large as the input was, and the bilinear one's (UpSampleBilinear2d.cu).

    Forward, the kernels of all others than the nearest take any strides.
    """
    return _upsample(args[0], args[2][-2:])


@scratch(
    *(_aten.upsample_nearest1d, _aten._upsample_nearest_exact1d),
    *(_aten.upsample_nearest1d_backward, _aten._upsample_nearest_exact1d_backward),
)
def upsample_nearest1d(args: Any, card: Card) -> list[int]:
    """Rows are upsampled contiguous, and so are their gradients (native/cuda/UpSampleNearest1d.cu)."""
    return contiguous(args[0])


def _volume(source: torch.Tensor, spatial: Any) -> list[int]:
    """The copy of `source`, and before it a contiguous result where the result (laid out as `source`) is none."""
    copies = contiguous(source)
    if suggested_format(source) is not torch.contiguous_format:
        copies.insert(0, math.prod((*source.shape[:2], *spatial)) * source.element_size())
    return copies


@scratch(_aten.upsample_nearest3d, _aten._upsample_nearest_exact3d)
def upsample_nearest3d(args: Any, card: Card) -> list[int]:
    """Volumes are upsampled contiguous (native/cuda/UpSampleNearest3d.cu, upsample_nearest3d_out_cuda_template)."""
    return _volume(args[0], args[1])


@scratch(_aten.upsample_nearest3d_backward, _aten._upsample_nearest_exact3d_backward)
def upsample_nearest3d_backward(args: Any, card: Card) -> list[int]:
    """So are their gradients; the result is contiguous or copied into."""
    return _volume(args[0], args[2][-3:])
