"""Padding by reflection: copies of what is not contiguous (native/cuda/ReflectionPad.cu).

Padding by replication takes any strides, of volumes too (native/cuda/ReplicationPadding.cu: packed accessors).
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import scratch

_aten = torch.ops.aten


@scratch(
    *(_aten.reflection_pad1d, _aten.reflection_pad2d, _aten.reflection_pad3d),
    *(_aten.reflection_pad1d_backward, _aten.reflection_pad2d_backward, _aten.reflection_pad3d_backward),
)
def reflection_pad(args: Any, card: Card) -> list[int]:
    """Of the input, and on the way back of the gradient."""
    return contiguous(args[0])
