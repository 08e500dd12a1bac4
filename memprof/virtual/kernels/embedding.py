"""Embeddings; the backward pass sorts the indices and sums the rows of equal ones in steps.

For more than 3,072 indices the sums of every part of a run of equal indices are kept in float32, a row each: room for
them is made for the worst case, whatever the indices are, so that with a large vocabulary it is gigabytes.
Sources: native/cuda/Embedding.cu, native/cuda/EmbeddingBackwardKernel.cu.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import input_copies, kernel
from memprof.virtual.kernels.sorting import radix_sort_scratch, scan_scratch
from memprof.virtual.launch import Launch

_aten = torch.ops.aten


@input_copies(_aten.embedding)
def embedding_copy(args: Any) -> list[int]:
    """Indices that cannot be viewed flat are copied (native/Embedding.cpp, embedding)."""
    return contiguous(args[1])


FEW_INDICES = 3072
_ROWS_PER_PART = 10
"""Rows of equal indices that one thread adds up (NROWS_PER_THREAD)."""


@kernel(_aten.embedding_dense_backward)
def embedding_dense_backward(launch: Launch) -> Any:
    """The gradient of the table, dense, and what sorting and summing takes."""
    grad, indices, rows, _, by_frequency = launch.args
    if not (grad.is_meta and indices.is_meta):
        return NotImplemented
    count, item, width = indices.numel(), indices.element_size(), grad.shape[-1]
    many = count > FEW_INDICES or by_frequency
    with contextlib.ExitStack() as held:

        def hold(*sizes: int) -> None:
            held.enter_context(launch.scratch(*sizes))

        hold(*contiguous(indices, grad))
        if many:
            hold(count * item, count * item)  # the indices sorted, and where each was
            launch.transients(count * item, radix_sort_scratch(count, item, item, 8 * item, launch.card))
            if by_frequency:
                hold(count * item)
        result = launch.new((rows, width), grad.dtype)
        if many and count:
            segments = min(count, rows)
            parts = count // _ROWS_PER_PART + segments
            hold(count * item, 8)
            launch.transients(scan_scratch(count, 4))
            hold(segments * item, segments * item)
            launch.transients(scan_scratch(segments, item))
            hold(8, parts * item, parts * width * max(4, grad.element_size()))
    return result
