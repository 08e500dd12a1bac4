"""Pooling and windows: copies of what is not laid out as their kernels take it.

Sources: native/cuda/AveragePool2d.cu and 3d, DilatedMaxPool2d.cu and 3d, AdaptiveAveragePooling.cu and 3d,
AdaptiveMaxPooling2d.cu and 3d, MaxUnpooling.cu, Im2Col.cu, Col2Im.cu. Fractional pooling, grid samples and padding by
replication take any strides.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous, suggested_format
from memprof.virtual.kernels.registry import input_copies, scratch

_aten = torch.ops.aten


@scratch(_aten.avg_pool2d, _aten.max_pool2d_with_indices, _aten.max_pool3d_with_indices)
def pool(args: Any, card: Card) -> list[int]:
    """Of the input, in the layout that it is nearest to."""
    return contiguous(args[0], layout=suggested_format(args[0]))


@scratch(_aten.avg_pool2d_backward, _aten.max_pool2d_with_indices_backward, _aten.max_pool3d_with_indices_backward)
def pool_backward(args: Any, card: Card) -> list[int]:
    """Of input, gradient and indices, in the input's layout."""
    return contiguous(args[1], args[0], *_indices(args), layout=suggested_format(args[1]))


def _indices(args: Any) -> list[torch.Tensor]:
    return [arg for arg in args[2:] if isinstance(arg, torch.Tensor)]


@scratch(_aten.avg_pool3d, _aten.avg_pool3d_backward, _aten._adaptive_avg_pool3d_backward)
def contiguous_only(args: Any, card: Card) -> list[int]:
    """Of the input, and on the way back of the gradient."""
    return contiguous(args[0])


@scratch(_aten._adaptive_avg_pool2d_backward)
def adaptive_average_backward(args: Any, card: Card) -> list[int]:
    """Of the gradient, unless the input is channels-last."""
    return contiguous(args[0]) if suggested_format(args[1]) is torch.contiguous_format else []


@scratch(_aten.adaptive_max_pool2d, _aten.adaptive_max_pool3d)
def adaptive_max(args: Any, card: Card) -> list[int]:
    """Of a batch; one sample may have any strides."""
    return _of_batch(args)


@input_copies(_aten._adaptive_avg_pool2d, _aten._adaptive_avg_pool3d)
def adaptive_average(args: Any) -> list[int]:
    """Likewise, before the result is made; what is channels-last stays so in two dimensions."""
    channels_last = args[0].dim() == 4 and suggested_format(args[0]) is not torch.contiguous_format
    return [] if channels_last else _of_batch(args)


def _of_batch(args: Any) -> list[int]:
    return contiguous(args[0]) if args[0].dim() == len(args[1]) + 2 else []


@scratch(_aten.adaptive_max_pool2d_backward, _aten.adaptive_max_pool3d_backward)
def adaptive_max_backward(args: Any, card: Card) -> list[int]:
    """Of gradient and indices."""
    return contiguous(args[0], *_indices(args))


@input_copies(_aten.max_unpool2d, _aten.max_unpool3d, _aten.im2col, _aten.col2im)
def before_the_result(args: Any) -> list[int]:
    """Of all inputs."""
    return contiguous(*(arg for arg in args if isinstance(arg, torch.Tensor)))
