"""apex.amp at O1: patches that cast the arguments of PyTorch's functions and methods in Apex's lists.

Sources: apex/amp/amp.py (init, and the functions that a program registers), wrap.py, utils.py, rnn_compat.py and lists/
of NVIDIA/apex@25.05. A float32 parameter that goes into a half-precision function is cast once until `scale_loss` ends.
memprof's own code stands for kernels, so that functions called from it are not cast.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from memprof.patching import PatchSet
from memprof.stubs.registry import register_in
from memprof.stubs.tools import keep_for_run
from memprof.torch_private import kernels


def _split_names(names: str) -> list[str]:
    return names.split()


_CONVOLUTIONS = _split_names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc")
_HALF_FUNCTIONS = [*_CONVOLUTIONS, *_split_names("prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm")]
_FLOAT_FUNCTIONS = _split_names(
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std "
    "sum var renorm"
)
_PROMOTED_FUNCTIONS = _split_names("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne")
_SEQUENCE_FUNCTIONS = ["cat", "stack"]
_FLOAT_NN_FUNCTIONS = _split_names(
    "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm "
    "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
    "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
    "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss"
)
_HALF_METHODS = ["__matmul__", *_HALF_FUNCTIONS]
_FLOAT_METHODS = ["__ipow__", "__pow__", "__rpow__", "cpu", *_FLOAT_FUNCTIONS]
_OPERATORS = "add div eq ge gt iadd idiv imul isub itruediv le lt mul ne radd rdiv rmul rsub rtruediv sub truediv"
_PROMOTED_METHODS = [*(f"__{name}__" for name in _OPERATORS.split()), *_PROMOTED_FUNCTIONS]
_BINARY_CROSS_ENTROPY_ERROR = (
    "amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` It requires that the output "
    "of the previous function be already a FloatTensor."
)
_RNN_LAYERS = ("rnn_relu", "rnn_tanh", "gru", "lstm")
_Decorator = Callable[[Any], Any]


class CastState:
    """The state of O1's casts: whether they are active, and the cached float16 casts of parameters."""

    def __init__(self) -> None:
        self.is_active = False
        self.half_by_parameter: dict[torch.Tensor, torch.Tensor] = {}
        self.overflow_flag: torch.Tensor | None = None  # of a scaler that the handle has and does not use
        # Functions that the program registers before `initialize`: module, name, and wrapper.
        self.registered_functions: list[tuple[Any, str, _Decorator]] = []


def get_cast_state() -> CastState:
    """Return the state of this run's casts."""
    return keep_for_run("apex.amp.casts", CastState)


def _iter_floats(value) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested argument if all its values are floating-point tensors, else nothing."""
    leaves = list(_iter_leaves(value))
    if all(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves):
        yield from leaves


def _iter_leaves(value) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _iter_leaves(item)
    else:
        yield value


def _cast(dtype: torch.dtype, value):
    """Return `value`, a tensor or nested sequence, cast to `dtype` if it has only floating-point tensors on a GPU."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.is_cuda else value
    if isinstance(value, (tuple, list)) and any(True for _ in _iter_floats(value)):
        return type(value)([_cast(dtype, item) for item in value])
    return value


def _cast_parameter(value):
    """Return the cached float16 cast of `value` if it is a float32 parameter on a GPU, else `value`."""
    if not isinstance(value, torch.nn.Parameter) or value.dtype != torch.float32 or not value.is_cuda:
        return value
    cache = get_cast_state().half_by_parameter
    half = cache.get(value)
    if half is None or (torch.is_grad_enabled() and value.requires_grad != half.requires_grad):
        half = cache[value] = value.half()
    return half


def _is_called_by_memprof() -> bool:
    """Return whether memprof's own code calls a patched function, whose arguments are then not cast."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("memprof.")


def _wrap(function, convert: Callable[[tuple[Any, ...], dict[str, Any]], Any], *, is_always_on: bool = False):
    """Return a wrapper of `function` that converts its arguments by `convert` while casts are active."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if (is_always_on or get_cast_state().is_active) and not _is_called_by_memprof():
            args, kwargs = convert(args, kwargs)
        return function(*args, **kwargs)

    return call


def _map_args(fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    return tuple(map(fn, args)), {name: fn(value) for name, value in kwargs.items()}


_to_half, _to_float = functools.partial(_cast, torch.float16), functools.partial(_cast, torch.float32)


def _wrap_with_cast(fn: Callable[[Any], Any], function):
    """Return a wrapper of `function` that casts its arguments by `fn`; the original arguments live until it returns."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not get_cast_state().is_active or _is_called_by_memprof():
            return function(*args, **kwargs)
        if fn is _to_half:
            args, kwargs = _map_args(_cast_parameter, args, kwargs)
        cast_args, cast_kwargs = _map_args(fn, args, kwargs)
        return function(*cast_args, **cast_kwargs)

    return call


_cast_to_half = functools.partial(_wrap_with_cast, _to_half)
_cast_to_float = functools.partial(_wrap_with_cast, _to_float)


def _cast_to_widest(function):
    def convert(args, kwargs):
        dtypes = {tensor.dtype for value in (*args, *kwargs.values()) for tensor in _iter_floats(value)}
        if len(dtypes) <= 1:
            return args, kwargs
        if dtypes != {torch.float16, torch.float32}:
            raise NotImplementedError(f"Do not know how to handle these types to promote: {dtypes}")
        return _map_args(_to_float, args, kwargs)

    return _wrap(function, convert)


def _cast_sequence_to_widest(function):
    def convert(args, kwargs):
        seq, *rest = args
        if {x.dtype for x in seq} == {torch.float16, torch.float32}:
            seq = [_to_float(x) for x in seq]
        return (seq, *rest), kwargs

    return _wrap(function, convert)


def _cast_like_first(function):
    def convert(args, kwargs):
        fn = {torch.float16: _to_half, torch.float32: _to_float}.get(args[0].dtype)
        rest, kwargs = _map_args(fn, args[1:], kwargs) if fn is not None else (args[1:], kwargs)
        return (args[0], *rest), kwargs

    return _wrap(function, convert)


def _refuse_half(function, message: str, *, is_method: bool):
    """Return a wrapper of `function` that raises an error for float16; of a method, only `self` is checked."""

    def convert(args, kwargs):
        checked_args = args[:1] if is_method else (*args, *kwargs.values())
        if any(x.is_cuda and x.dtype == torch.float16 for value in checked_args for x in _iter_floats(value)):
            raise NotImplementedError(message)
        rest, cast_kwargs = _map_args(_to_float, args[1:], kwargs) if is_method else (args[1:], kwargs)
        return (*args[:1], *rest), cast_kwargs

    return _wrap(function, convert, is_always_on=True)


class _RecurrentFunctions:
    """A replacement of torch.nn.modules.rnn's `_VF`, whose cells and layers cast their arguments to float16."""

    def __init__(self, original) -> None:
        self._original = original
        for name in _RNN_LAYERS:
            setattr(self, f"{name}_cell", _cast_to_half(getattr(original, f"{name}_cell")))
            setattr(self, name, _cast_recurrent_layer(getattr(original, name)))

    def __getattr__(self, name: str):
        return getattr(self._original, name)


def _cast_recurrent_layer(function):
    """Return a wrapper of a recurrent layer that copies its weights, in half precision, into one tensor per call."""

    @functools.wraps(function)
    def call(*args):
        if not get_cast_state().is_active:
            return function(*args)
        position = 2 if isinstance(args[6], bool) else 3  # the other signature has a packed sequence
        weights, offset = args[position], 0
        buffer = args[0].new_empty((sum(weight.numel() for weight in weights),), dtype=torch.half)
        copies = []
        for weight in weights:
            copy = weight.new_empty(0, dtype=torch.half).set_(buffer.untyped_storage(), offset, weight.shape)
            copies.append(copy.copy_(weight))
            offset += weight.numel()
        return function(*(copies if i == position else _to_half(arg) for i, arg in enumerate(args)))

    return call


def install_casts() -> PatchSet:
    """Patch PyTorch's functions and methods with O1's casts; return the patches, whose `undo` removes them."""
    patches = PatchSet()

    def wrap_each(owner, names: Iterable[str], wrap: _Decorator) -> None:
        for name in names:
            if hasattr(owner, name):
                patches.set(owner, name, wrap(getattr(owner, name)))

    for module, name, wrap in get_cast_state().registered_functions:
        wrap_each(module, [name], wrap)
    get_cast_state().registered_functions.clear()
    wrap_each(functional, [*_CONVOLUTIONS, "linear"], _cast_to_half)
    wrap_each(functional, _FLOAT_NN_FUNCTIONS, _cast_to_float)
    wrap_each(torch, _HALF_FUNCTIONS, _cast_to_half)
    wrap_each(torch, _FLOAT_FUNCTIONS, _cast_to_float)
    wrap_each(torch.Tensor, _HALF_METHODS, _cast_to_half)
    wrap_each(torch.Tensor, _FLOAT_METHODS, _cast_to_float)
    for owner, names in ((torch, _PROMOTED_FUNCTIONS), (torch.Tensor, _PROMOTED_METHODS)):
        wrap_each(owner, names, _cast_to_widest)
        wrap_each(owner, _SEQUENCE_FUNCTIONS, _cast_sequence_to_widest)
    for name in _FLOAT_FUNCTIONS:
        message = f"Cannot call in-place function {name}_ with fp16 arguments."
        wrap_each(torch, [f"{name}_"], functools.partial(_refuse_half, message=message, is_method=False))
    for name in _FLOAT_METHODS:
        message = f"Cannot call in-place method {name}_ on fp16 Tensors."
        wrap_each(torch.Tensor, [f"{name}_"], functools.partial(_refuse_half, message=message, is_method=True))
    wrap_each(torch.Tensor, [f"{name}_" for name in (*_HALF_METHODS, *_PROMOTED_METHODS)], _cast_like_first)
    patches.set(*kernels.VF_of_rnn.patch(_RecurrentFunctions(kernels.VF_of_rnn.get())))
    layers = {name: _cast_recurrent_layer(function) for name, function in kernels.rnn_impls.get().items()}
    patches.set(*kernels.rnn_impls.patch(layers))
    refuse = functools.partial(_refuse_half, message=_BINARY_CROSS_ENTROPY_ERROR, is_method=False)
    wrap_each(functional, ["binary_cross_entropy"], refuse)
    get_cast_state().is_active = True
    get_cast_state().overflow_flag = torch.tensor([0], dtype=torch.int, device="cuda")
    return patches


def suspend_casts(step):
    """Return a wrapper of the optimizer method `step` during which no arguments are cast."""

    def call(self, *args, **kwargs):
        get_cast_state().is_active = False
        result = step(*args, **kwargs)
        get_cast_state().is_active = True
        return result

    return call


_register = register_in("apex.amp.amp", "apex.amp", source="NVIDIA/apex@25.05:apex/amp/amp.py")


def _register_decorators(name: str, wrap: _Decorator, description: str) -> None:
    """Register the stubs of apex.amp's decorators NAME_function and register_NAME_function."""

    def decorate(fn):
        return wrap(fn)

    def register(module, name):
        if not hasattr(module, name):
            raise ValueError(f"No function named {name} in module {module}.")
        get_cast_state().registered_functions.append((module, name, wrap))

    decorate.__name__, register.__name__ = f"{name}_function", f"register_{name}_function"
    decorate.__doc__ = f"Return a function whose arguments are cast to {description}."
    register.__doc__ = f"Register `module.name` as {name}_function does, once amp is initialized at O1."
    _register(decorate), _register(register)


_register_decorators("half", _cast_to_half, "float16, parameters once")
_register_decorators("float", _cast_to_float, "float32")
_register_decorators("promote", _cast_to_widest, "the widest of their dtypes")
