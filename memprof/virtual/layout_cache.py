"""Output layouts remembered: an operator called again with inputs of the same layout gives the same output layout.

Many meta kernels are written in Python and take 100 µs; a transformer calls them with the same few dozen layouts, layer
after layer. A layout is everything a meta tensor has: size, stride and dtype.
"""

from __future__ import annotations

from typing import Any

import torch

_META = torch.device("meta")
_empty_strided = torch.empty_strided

UNCACHED = object()
"""Says that outputs of this call must not be remembered."""


def describe(result: Any) -> Any:
    """The layout of `result`, to `build` it again from; UNCACHED if it holds anything but new, plain meta tensors."""
    if isinstance(result, torch.Tensor):
        if not result.is_meta or type(result) is not torch.Tensor or result.storage_offset():
            return UNCACHED
        if result.is_complex() or result.is_neg() or result.layout is not torch.strided:
            return UNCACHED
        numel_in_storage = result.untyped_storage().nbytes() // result.element_size()
        if numel_in_storage != _extent(result):
            return UNCACHED
        return (result.size(), result.stride(), result.dtype)
    if isinstance(result, (list, tuple)):
        parts = [None if part is None else describe(part) for part in result]
        if any(part is UNCACHED for part in parts):
            return UNCACHED
        tensors = [part for part in result if isinstance(part, torch.Tensor)]
        if len({tensor.untyped_storage()._cdata for tensor in tensors}) != len(tensors):
            return UNCACHED
        return parts if isinstance(result, list) else _TupleLayout(parts)
    return UNCACHED


class _TupleLayout(list[Any]):
    """A tuple of outputs, told apart from one output's layout (itself a tuple)."""


def build(layout: Any) -> Any:
    """New meta tensors of a layout that `describe` gave."""
    if layout is None:
        return None
    if isinstance(layout, tuple):
        return _empty_strided(layout[0], layout[1], dtype=layout[2], device=_META)
    parts = [build(part) for part in layout]
    return tuple(parts) if isinstance(layout, _TupleLayout) else parts


def _extent(tensor: torch.Tensor) -> int:
    """Elements that the storage of a tensor with this size and stride must have, as `empty_strided` makes it."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
