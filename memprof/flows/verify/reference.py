"""The float64 reference: a model's own code, run so that no number in it has fewer digits than float64.

Models cast on the way: Hugging Face's losses take `logits.float()`, norms and rotary embeddings compute in float32,
masks are made in float32. With parameters in float64 such a model's loss is a float32 number still, and a deviation
from it is one from its rounding. Here every cast to a smaller floating dtype is one to float64, and so is every dtype
that a function is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private.dispatch import TorchDispatchMode
from memprof.torch_private.pytree import tree_iter, tree_map

_SMALLER = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
# Nearly all that functions are given.
_NOTHING_IN_THEM = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, int, float, bool, slice, type(None)})
_TYPES = frozenset({"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"})


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return torch.Tensor.double(args[0])
        return func(*map(_to_float64, args), **{name: _to_float64(value) for name, value in (kwargs or {}).items()})


def _to_float64(value: Any) -> Any:
    kind = type(value)
    if kind in _NOTHING_IN_THEM:
        return value
    if kind is tuple or kind is list:
        return kind(map(_to_float64, value))
    return _widened(value) if kind in (torch.dtype, str) else tree_map(_widened, value)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _SMALLER else value
    return "torch.DoubleTensor" if isinstance(value, str) and value in _TYPES else value


class _Watch(TorchDispatchMode):
    """Notes every operator that gives numbers of a smaller dtype."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(part, torch.Tensor) and part.dtype in _SMALLER for part in tree_iter(result)):
            self._found.add(str(func))
        return result


@contextlib.contextmanager
def float64_throughout(narrow: set[str] | None = None) -> Iterator[None]:
    """Have the code of a model in float64 compute in float64 alone; forward and backward belong inside.

    `narrow` gets the names of operators that give numbers of a smaller dtype nevertheless; None watches nothing.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _KeepFloat64(), contextlib.nullcontext() if narrow is None else _Watch(narrow):
            yield
    finally:
        torch.set_default_dtype(before)
