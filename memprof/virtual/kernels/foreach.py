"""Operators on lists of tensors, as gradient clipping and optimizers call them."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.reductions import accumulator_bytes_per_value
from memprof.virtual.kernels.registry import aten, input_copies, kernel

_CHUNK = 65_536  # elements of a tensor that a block of a multi-tensor kernel takes (native/cuda/MultiTensorApply.cuh)
_TILE_BYTES = 2_048  # bytes that a block of the kernel of `_chunk_cat` copies (native/cuda/TensorShape.cu)
_GLOBAL_NORM = hasattr(aten, "_foreach_global_norm")


@input_copies(aten._foreach_norm)
def foreach_norm(args: Any) -> list[int]:
    """Return the bytes of a float32 norm for each chunk of each tensor: [tensors, chunks of the largest tensor].

    Releases that have a global norm also allocate 320 elements and a scalar. Orders other than 1, 2 and infinity run
    tensor by tensor. Source: native/cuda/ForeachReduceOp.cu.
    """
    tensors = args[0]
    order = args[1] if len(args) > 1 else 2
    if not tensors or len({tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return []
    if order not in (1, 2, math.inf):
        return []
    item = accumulator_bytes_per_value(tensors[0])
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [item * len(tensors) * chunks, *([item * 320, tensors[0].element_size()] if _GLOBAL_NORM else [])]


@kernel(aten._chunk_cat)
def chunk_cat(launch: KernelContext) -> Any:
    """Allocate the kernel's metadata and release it before the result: one number for each block, six for each tensor,
    and two more, int64 (native/cuda/TensorShape.cu, get_chunk_cat_metadata).

    fully_shard copies gradients into one buffer by this operator. Tensors that are not dense are padded in C++.
    """
    tensors = launch.argument(0, "tensors")
    dim, chunks = launch.argument(1, "dim"), launch.argument(2, "num_chunks")
    first, out = tensors[0], launch.kwargs.get("out", tensors[0])
    casts = first.dtype is torch.bfloat16 and out.dtype is torch.float32
    if (first.dtype is out.dtype or casts) and all(map(aten.is_non_overlapping_and_dense, tensors)):
        sizes = [-(-t.size(dim) // chunks) * math.prod(t.shape[dim + 1 :]) * out.element_size() for t in tensors]
        blocks = sum(-(-size // _TILE_BYTES) for size in sizes)
        launch.transients(8 * (blocks + 6 * len(tensors) + 2))
    return NotImplemented
