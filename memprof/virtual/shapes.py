"""The strides of an operator's results, computed as by torch's C++ code on a GPU.

For meta tensors torch uses Python code instead (torch/_meta_registrations.py, `activate_meta`), whose strides sometimes
differ: TensorIterator (aten/src/ATen/TensorIterator.cpp) orders all dimensions by stride, those of size 1 included
(`reorder_dimensions`), and takes its fast path only if all operands have one shape (`compute_fast_setup_type`);
torch/_prims_common does neither. Strides matter because the copies that a convolution makes depend on them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dispatch

_Key = torch.DispatchKey
_has_kernel = dispatch.dispatch_has_kernel_for_dispatch_key
_aten = torch.ops.aten
_empty_like = _aten.empty_like.default
_META = torch.device("meta")


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on meta tensors; its results have the strides of the C++ implementation."""
    if _is_structured(func):
        return func._op_dk(_Key.CompositeExplicitAutogradNonFunctional, *args, **kwargs)
    result = func(*args, **kwargs)
    compute_strides = _STRIDES.get(func.overloadpacket)
    if compute_strides is None or func._schema.is_mutable:
        return result
    first, *others = result if isinstance(result, tuple) else [result]
    strides = compute_strides(args, first)
    if strides != first.stride():
        first = torch.empty_strided(first.size(), strides, dtype=first.dtype, device=_META)
    return (first, *others) if others else first


@functools.cache
def _is_structured(func: Any) -> bool:
    """Return whether torchgen made a device-independent kernel of the operator's shape function, which Python has
    replaced for meta tensors. Operators with `out` arguments are excluded: they choose no strides."""
    replaced = _Key.Meta in func.py_kernels and not func._schema.is_mutable
    return replaced and _has_kernel(func.name(), "CompositeExplicitAutogradNonFunctional")


# -- what has no such function ----------------------------------------------------------------------------------------


def by_iterator(*operands: Any) -> tuple[int, ...]:
    """Return the strides that TensorIterator gives the result of one or two tensors or numbers, as for structured
    operators."""
    layouts = [_empty_like_operand(one) for one in operands]
    made: torch.Tensor = run(_aten.exp.default if len(layouts) == 1 else _aten.add.Tensor, layouts, {})
    return made.stride()


def _empty_like_operand(operand: Any) -> torch.Tensor:
    size, stride = (operand.size(), operand.stride()) if isinstance(operand, torch.Tensor) else ((), ())
    return torch.empty_strided(size, stride, device=_META)


def _contiguous_strides(args: Any, made: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(made.size(), device=_META).stride()


# Operator -> function that returns the strides of its (first) result from its arguments.
_STRIDES: dict[Any, Callable[[Any, torch.Tensor], tuple[int, ...]]] = {
    # native/Activation.cpp, native/BinaryOps.cpp, native/TensorFactories.cpp, native/Loss.cpp
    **dict.fromkeys((_aten.relu, _aten.angle), lambda args, made: by_iterator(args[0])),
    **dict.fromkeys(
        (
            _aten.logical_and, _aten.logical_or, _aten.logical_xor, _aten.floor_divide, _aten._prelu_kernel,
            _aten.complex,
        ),
        lambda args, made: by_iterator(*args[:2]),
    ),
    _aten.rsub: lambda args, made: by_iterator(args[1], args[0]),
    **dict.fromkeys(
        (_aten.hardtanh, _aten.deg2rad, _aten.rad2deg), lambda args, made: torch.empty_like(args[0]).stride()
    ),
    _aten.huber_loss: lambda args, made: torch.empty_like(args[0]).stride() if made.dim() else (),
    # native/group_norm.cpp, native/cuda/layer_norm_kernel.cu, native/Distributions.cpp
    **dict.fromkeys((_aten.native_group_norm, _aten.native_layer_norm, _aten.normal), _contiguous_strides),
}  # fmt: skip


@contextlib.contextmanager
def register_cpp_results() -> Iterator[None]:
    """Context manager: `empty_like` on meta has the strides of C++ (native/TensorFactories.cpp), for every caller."""
    for_meta: Any = dispatch.dispatch_library("IMPL", "aten", "Meta", __file__, 0)
    in_python = _empty_like.py_kernels.get(_Key.Meta)

    def empty_like(tensor: torch.Tensor, **options: Any) -> Any:
        if in_python is not None and any(isinstance(size, torch.SymInt) for size in tensor.size()):
            return in_python(tensor, **options)  # while torch.compile traces with symbolic sizes
        return _empty_like._op_dk(_Key.CompositeExplicitAutograd, tensor, **options)

    try:
        for_meta.impl("empty_like", "Meta", empty_like, False)
        yield
    finally:
        for_meta.reset()
