"""Calls of `Tensor.repeat` along dimensions of one element, of which `expand` makes a view that takes no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from memprof.trace.events import Trace
from memprof.units import MIB

MIN_BYTES = MIB  # smaller copies do no harm


@contextlib.contextmanager
def record_repeat(trace: Trace, tensor: torch.Tensor, counts: Sequence[int]) -> Iterator[None]:
    """Context manager: record the copy that the body makes of `tensor`, `counts` times along each dimension, even if
    there is no memory for it."""
    begin = len(trace.storages)
    sizes = (*[1] * (len(counts) - tensor.dim()), *tensor.shape)
    may_expand = any(count > 1 for count in counts) and all(
        size == 1 or count == 1 for size, count in zip(sizes, counts, strict=True)
    )
    try:
        yield
    finally:
        made = range(begin, len(trace.storages)) if may_expand else ()
        copy = max(made, key=lambda index: trace.storages[index].num_bytes, default=None)
        if copy is not None and trace.storages[copy].num_bytes >= MIN_BYTES:
            trace.repeats.append(copy)
