"""Cache of output layouts: inputs of equal layouts give outputs of equal layouts, for one operator.

Many meta kernels are written in Python and take 100 µs; a transformer calls them with the same few dozen layouts, layer
after layer. A layout is the metadata of a meta tensor: size, stride and dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_META = torch.device("meta")

UNCACHED = object()  # marks a result that must not be cached


def make_factory(result: Any) -> Any:
    """Return a function that creates meta tensors with the layout of `result`; UNCACHED if `result` contains anything
    but new, plain meta tensors."""
    if isinstance(result, torch.Tensor):
        if not result.is_meta or type(result) is not torch.Tensor or result.storage_offset():
            return UNCACHED
        if result.is_complex() or result.is_neg() or result.layout is not torch.strided:
            return UNCACHED
        numel_in_storage = result.untyped_storage().nbytes() // result.element_size()
        if numel_in_storage != _storage_elements(result):
            return UNCACHED
        return functools.partial(torch.empty_strided, result.size(), result.stride(), dtype=result.dtype, device=_META)
    if isinstance(result, (list, tuple)):
        factories = [None if item is None else make_factory(item) for item in result]
        if any(factory is UNCACHED for factory in factories):
            return UNCACHED
        tensors = [item for item in result if isinstance(item, torch.Tensor)]
        if len({tensor.untyped_storage()._cdata for tensor in tensors}) != len(tensors):
            return UNCACHED
        kind = list if isinstance(result, list) else tuple
        return lambda: kind(None if factory is None else factory() for factory in factories)
    return UNCACHED


def _storage_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements in the storage that `empty_strided` allocates for the layout of `tensor`."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
