"""Operators on lists of tensors (`_foreach_norm`, `_chunk_cat`), which gradient clipping and fully_shard call."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.reductions import accumulator_bytes_per_value
from memprof.virtual.kernels.registry import aten, input_copies, kernel

_CHUNK_ELEMENTS = 65_536  # elements per thread block of a multi-tensor kernel (native/cuda/MultiTensorApply.cuh)
_TILE_BYTES = 2_048  # bytes that a block of the kernel of `_chunk_cat` copies (native/cuda/TensorShape.cu)
_HAS_GLOBAL_NORM = hasattr(aten, "_foreach_global_norm")


@input_copies(aten._foreach_norm)
def compute_foreach_norm_buffers(args: Any) -> list[int]:
    """Return the bytes of a float32 norm for each chunk of each tensor: shape [tensors, chunks of the largest tensor].

    Releases of torch that have `_foreach_global_norm` also allocate 320 elements and a scalar. Norm orders other than
    1, 2 and infinity run tensor by tensor and need no buffer. Source: native/cuda/ForeachReduceOp.cu.
    """
    tensors = args[0]
    order = args[1] if len(args) > 1 else 2
    if not tensors or len({tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return []
    if order not in (1, 2, math.inf):
        return []
    itemsize = accumulator_bytes_per_value(tensors[0])
    chunks = max(-(-tensor.numel() // _CHUNK_ELEMENTS) for tensor in tensors)
    norm_buffers = [itemsize * 320, tensors[0].element_size()] if _HAS_GLOBAL_NORM else []
    return [itemsize * len(tensors) * chunks, *norm_buffers]


@kernel(aten._chunk_cat)
def chunk_cat(launch: KernelContext) -> Any:
    """Allocate and free the kernel's metadata before the result: an int64 per thread block, six per tensor, and two
    more (native/cuda/TensorShape.cu, get_chunk_cat_metadata).

    fully_shard copies gradients into one buffer with this operator. Tensors that are not dense are padded in C++
    instead.
    """
    tensors = launch.argument(0, "tensors")
    dim, num_chunks = launch.argument(1, "dim"), launch.argument(2, "num_chunks")
    first_tensor, out = tensors[0], launch.kwargs.get("out", tensors[0])
    is_cast = first_tensor.dtype is torch.bfloat16 and out.dtype is torch.float32
    if (first_tensor.dtype is out.dtype or is_cast) and all(map(aten.is_non_overlapping_and_dense, tensors)):
        sizes = [-(-t.size(dim) // num_chunks) * math.prod(t.shape[dim + 1 :]) * out.element_size() for t in tensors]
        num_blocks = sum(-(-size // _TILE_BYTES) for size in sizes)
        launch.transients(8 * (num_blocks + 6 * len(tensors) + 2))
    return NotImplemented
