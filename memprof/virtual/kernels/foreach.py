"""Operators on lists of tensors, as gradient clipping and optimizers call them."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.kernels.reductions import opmath
from memprof.virtual.kernels.registry import input_copies

_aten = torch.ops.aten

_CHUNK = 65_536
"""Elements of a tensor that a block of a multi-tensor kernel takes (native/cuda/MultiTensorApply.cuh)."""
_GLOBAL_NORM = hasattr(_aten, "_foreach_global_norm")


@input_copies(_aten._foreach_norm)
def foreach_norm(args: Any) -> list[int]:
    """A float32 norm for each chunk of each tensor, as many as the largest tensor has (native/cuda/ForeachReduceOp.cu).

    It is made before the results and dropped with the call: gradient clipping takes it. Releases that have a global
    norm make a buffer of 320 and a scalar for that as well. Other orders than 1, 2 and infinity are taken one by one.
    """
    tensors = args[0]
    order = args[1] if len(args) > 1 else 2
    if not tensors or len({tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return []
    if order not in (1, 2, math.inf):
        return []
    item = opmath(tensors[0])
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [item * len(tensors) * chunks, *([item * 320, tensors[0].element_size()] if _GLOBAL_NORM else [])]
