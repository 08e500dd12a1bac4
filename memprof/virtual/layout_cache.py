"""Cache of output layouts: an operator called again with inputs of the same layout gives the same output layout.

Many meta kernels are written in Python and take 100 µs; a transformer calls them with the same few dozen layouts, layer
after layer. A layout is the metadata of a meta tensor: size, stride and dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_META = torch.device("meta")

UNCACHED = object()  # marks a result that must not be cached


def maker_of(result: Any) -> Any:
    """Return a function that makes new meta tensors of the layout of `result`; UNCACHED if `result` contains anything
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
        makers = [None if part is None else maker_of(part) for part in result]
        if any(maker is UNCACHED for maker in makers):
            return UNCACHED
        tensors = [part for part in result if isinstance(part, torch.Tensor)]
        if len({tensor.untyped_storage()._cdata for tensor in tensors}) != len(tensors):
            return UNCACHED
        kind = list if isinstance(result, list) else tuple
        return lambda: kind(None if make is None else make() for make in makers)
    return UNCACHED


def _storage_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements in the storage that `empty_strided` makes for the tensor's layout."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
