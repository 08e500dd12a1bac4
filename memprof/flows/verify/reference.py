"""The float64 reference: run a model's own code with all floating-point numbers in float64.

Models cast internally: Hugging Face's losses use `logits.float()`, norms and rotary embeddings compute in float32, and
masks are created in float32. Even with float64 parameters such a model's loss is rounded to float32, and would hide
deviations of that size. Here every cast to a smaller floating dtype becomes a cast to float64, and every smaller dtype
among the arguments of a function becomes float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.torch_private.dispatch import TorchDispatchMode
from memprof.torch_private.pytree import tree_iter, tree_map

_SMALLER_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
# The most frequent types of arguments without a dtype.
_TYPES_WITHOUT_DTYPE = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, int, float, bool, slice, type(None)})
_TENSOR_TYPES = frozenset({"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"})


class _Float64Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return torch.Tensor.double(args[0])
        return func(*map(_to_float64, args), **{name: _to_float64(value) for name, value in (kwargs or {}).items()})


def _to_float64(value: Any) -> Any:
    value_type = type(value)
    if value_type in _TYPES_WITHOUT_DTYPE:
        return value
    if value_type is tuple or value_type is list:
        return value_type(map(_to_float64, value))
    return _widen(value) if value_type in (torch.dtype, str) else tree_map(_widen, value)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _SMALLER_DTYPES else value
    return "torch.DoubleTensor" if isinstance(value, str) and value in _TENSOR_TYPES else value


class _DtypeWatcher(TorchDispatchMode):
    """Dispatch mode: records the operators that return tensors of a smaller dtype."""

    def __init__(self, operator_names: set[str]) -> None:
        super().__init__()
        self._operator_names = operator_names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(part, torch.Tensor) and part.dtype in _SMALLER_DTYPES for part in tree_iter(result)):
            self._operator_names.add(str(func))
        return result


@contextlib.contextmanager
def compute_in_float64(operator_names: set[str] | None = None) -> Iterator[None]:
    """Context manager: compute forward and backward of a float64 model in float64 only.

    `operator_names` receives the operators that still return a smaller dtype; None: operators are not watched.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Mode(), contextlib.nullcontext() if operator_names is None else _DtypeWatcher(operator_names):
            yield
    finally:
        torch.set_default_dtype(default_dtype)
