"""The backward pass of an embedding, which sorts its indices and sums the rows of equal ones in steps.

For more than 3,072 indices the sums of every part of a run of equal indices are kept in float32, a row each: room for
them is made for the worst case, whatever the indices are, so that with a large vocabulary it is gigabytes.
Sources: native/cuda/Embedding.cu, native/cuda/EmbeddingBackwardKernel.cu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memprof.trace.events import GPU
from memprof.virtual.calls import Call, Operator
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.sorting import radix_sort_scratch, scan_scratch

if TYPE_CHECKING:
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")

FEW_INDICES = 3072
_ROWS_PER_PART = 10
"""Rows of equal indices that one thread adds up (NROWS_PER_THREAD)."""


def embedding_dense_backward(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The gradient of the table, dense, and what sorting and summing takes."""
    grad, indices, rows, _, by_frequency = call.args
    if not call.on_gpu or not grad.is_meta or not indices.is_meta:
        return NotImplemented
    taken: list[int] = []

    def take(num_bytes: int) -> int:
        index = mode.recorder.allocate_hidden(num_bytes, operator.name, place, GPU)
        taken.append(index)
        return index

    def give_back(*indexes: int) -> None:
        for index in indexes:
            taken.remove(index)
            mode.recorder.free_hidden(index)

    for copied in contiguous(indices, grad):
        take(copied)
    count, item, width = indices.numel(), indices.element_size(), grad.shape[-1]
    many = count > FEW_INDICES or by_frequency
    if many:
        take(count * item)  # sorted indices
        take(count * item)  # where each was
        arange = take(count * item)
        give_back(take(radix_sort_scratch(count, item, item, 8 * item)), arange)
        if by_frequency:
            take(count * item)
    result = torch.empty(rows, width, dtype=grad.dtype, device=_META)
    mode.record([result], operator.name, place, GPU)
    if many and count:
        segments = min(count, rows)
        parts = count // _ROWS_PER_PART + segments
        take(count * item)
        take(8)
        give_back(take(scan_scratch(count, 4)))
        take(segments * item)
        take(segments * item)
        give_back(take(scan_scratch(segments, item)))
        take(8)
        take(parts * item)
        take(parts * width * max(4, grad.element_size()))
    for index in reversed(taken):
        mode.recorder.free_hidden(index)
    return result


HANDLERS: dict[Any, Any] = {_aten.embedding_dense_backward: embedding_dense_backward}
