"""apex.amp at O1: casts around PyTorch's functions and methods, by Apex's own lists, until the run ends.

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


def _names(text: str) -> list[str]:
    return text.split()


_CONVOLUTIONS = _names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc")
_HALF_FUNCTIONS = [*_CONVOLUTIONS, *_names("prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm")]
_FLOAT_FUNCTIONS = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std "
    "sum var renorm"
)
_PROMOTED_FUNCTIONS = _names("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne")
_SEQUENCES = ["cat", "stack"]
_FLOAT_OF_MODULES = _names(
    "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm "
    "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
    "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
    "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss"
)
_HALF_METHODS = ["__matmul__", *_HALF_FUNCTIONS]
_FLOAT_METHODS = ["__ipow__", "__pow__", "__rpow__", "cpu", *_FLOAT_FUNCTIONS]
_OPERATORS = _names(
    "add div eq ge gt iadd idiv imul isub itruediv le lt mul ne radd rdiv rmul rsub rtruediv sub truediv"
)
_PROMOTED_METHODS = [*(f"__{name}__" for name in _OPERATORS), *_PROMOTED_FUNCTIONS]
_BANNED = (
    "amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` It requires that the output "
    "of the previous function be already a FloatTensor."
)
_LAYERS = ("rnn_relu", "rnn_tanh", "gru", "lstm")
_Cast = Callable[[torch.Tensor], torch.Tensor]


class Casts:
    """Apex's handle: whether casts are on, and the parameters that are cast already."""

    def __init__(self) -> None:
        self.active = False
        self.cache: dict[torch.Tensor, torch.Tensor] = {}
        self.flag: torch.Tensor | None = None  # of overflows: the handle has a scaler without use
        # Functions that the program registers before `initialize`: module, name, and wrapper.
        self.asked: list[tuple[Any, str, Callable[[Any], Any]]] = []


def casts() -> Casts:
    """Return the casts of this run."""
    return keep_for_run("apex.amp.casts", Casts)


def _half(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float16 or not x.is_cuda else x.half()


def _float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float32 or not x.is_cuda else x.float()


def _floats(value) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in an argument that has no other values."""
    leaves = list(_leaves(value))
    if all(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves):
        yield from leaves


def _leaves(value) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _cast(fn: _Cast, value):
    """Return an argument cast by `fn` if it has only floating-point tensors."""
    if isinstance(value, torch.Tensor):
        return fn(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)) and any(True for _ in _floats(value)):
        return _cast_nested(fn, value)
    return value


def _cast_nested(fn: _Cast, value):
    return type(value)([_cast_nested(fn, each) for each in value]) if isinstance(value, (tuple, list)) else fn(value)


def _cast_once(value):
    """Return the cached cast of a float32 parameter; the cast and the parameter agree in requires_grad."""
    if not isinstance(value, torch.nn.Parameter) or value.dtype != torch.float32 or not value.is_cuda:
        return value
    cache = casts().cache
    found = cache.get(value)
    if found is None or (torch.is_grad_enabled() and value.requires_grad != found.requires_grad):
        found = cache[value] = value.half()
    return found


def _is_inside() -> bool:
    """Return whether memprof itself calls a patched function, as a kernel, in which nothing is cast."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("memprof.")


def _wrap(function, convert: Callable[[tuple[Any, ...], dict[str, Any]], Any], *, always: bool = False):
    """Return `function` with its arguments converted by `convert` while casts are on."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if (always or casts().active) and not _is_inside():
            args, kwargs = convert(args, kwargs)
        return function(*args, **kwargs)

    return call


def _map_args(fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    return tuple(map(fn, args)), {name: fn(value) for name, value in kwargs.items()}


_to_half, _to_float = functools.partial(_cast, _half), functools.partial(_cast, _float)


def _wrap_with_cast(function, fn: Callable[[Any], Any]):
    """Return `function` with its arguments cast by `fn`; the original arguments live until it returns."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not casts().active or _is_inside():
            return function(*args, **kwargs)
        if fn is _to_half:
            args, kwargs = _map_args(_cast_once, args, kwargs)
        cast, named = _map_args(fn, args, kwargs)
        return function(*cast, **named)

    return call


def _cast_to_half(function):
    return _wrap_with_cast(function, _to_half)


def _cast_to_float(function):
    return _wrap_with_cast(function, _to_float)


def _cast_to_widest(function):
    def convert(args, kwargs):
        found = {tensor.dtype for value in (*args, *kwargs.values()) for tensor in _floats(value)}
        if len(found) <= 1:
            return args, kwargs
        if found != {torch.float16, torch.float32}:
            raise NotImplementedError(f"Do not know how to handle these types to promote: {found}")
        return _map_args(_to_float, args, kwargs)

    return _wrap(function, convert)


def _cast_sequence_to_widest(function):
    def convert(args, kwargs):
        seq, *others = args
        if {x.dtype for x in seq} == {torch.float16, torch.float32}:
            seq = [_to_float(x) for x in seq]
        return (seq, *others), kwargs

    return _wrap(function, convert)


def _cast_like_first(function):
    def convert(args, kwargs):
        fn = {torch.float16: _to_half, torch.float32: _to_float}.get(args[0].dtype)
        others, kwargs = _map_args(fn, args[1:], kwargs) if fn is not None else (args[1:], kwargs)
        return (args[0], *others), kwargs

    return _wrap(function, convert)


def _refuse_half(function, why: str, *, alone: bool):
    """Return `function` with an error for float16; with `alone`, the first argument decides, the others are cast."""

    def convert(args, kwargs):
        asked = args[:1] if alone else (*args, *kwargs.values())
        if any(x.is_cuda and x.dtype == torch.float16 for value in asked for x in _floats(value)):
            raise NotImplementedError(why)
        others, named = _map_args(_to_float, args[1:], kwargs) if alone else (args[1:], kwargs)
        return (*args[:1], *others), named

    return _wrap(function, convert, always=True)


class _RecurrentFunctions:
    """torch.nn.modules.rnn's `_VF`, with casts: cells as other functions; layers get weights in one new tensor."""

    def __init__(self, real) -> None:
        self._real = real
        for name in _LAYERS:
            setattr(self, f"{name}_cell", _cast_to_half(getattr(real, f"{name}_cell")))
            setattr(self, name, layer_in_half(getattr(real, name)))

    def __getattr__(self, name: str):
        return getattr(self._real, name)


def layer_in_half(function):
    """Return a recurrent layer whose weights are copied, in half precision, into one tensor at each call."""

    @functools.wraps(function)
    def call(*args):
        if not casts().active:
            return function(*args)
        places = 2 if isinstance(args[6], bool) else 3  # the other signature has a packed sequence
        weights, taken = args[places], 0
        flat = args[0].new_empty((sum(weight.numel() for weight in weights),), dtype=torch.half)
        copies = []
        for weight in weights:
            copy = weight.new_empty(0, dtype=torch.half).set_(flat.untyped_storage(), taken, weight.shape)
            copies.append(copy.copy_(weight))
            taken += weight.numel()
        return function(*(copies if at == places else _to_half(arg) for at, arg in enumerate(args)))

    return call


def install() -> PatchSet:
    """Install all casts; the returned patches undo them."""
    patches = PatchSet()

    def around(owner, names: Iterable[str], wrapped: Callable[[Any], Any]) -> None:
        for name in names:
            if hasattr(owner, name):
                patches.set(owner, name, wrapped(getattr(owner, name)))

    for module, name, wrapped in casts().asked:
        around(module, [name], wrapped)
    casts().asked.clear()
    around(functional, [*_CONVOLUTIONS, "linear"], _cast_to_half)
    around(functional, _FLOAT_OF_MODULES, _cast_to_float)
    around(torch, _HALF_FUNCTIONS, _cast_to_half)
    around(torch, _FLOAT_FUNCTIONS, _cast_to_float)
    around(torch.Tensor, _HALF_METHODS, _cast_to_half)
    around(torch.Tensor, _FLOAT_METHODS, _cast_to_float)
    for owner, names in ((torch, _PROMOTED_FUNCTIONS), (torch.Tensor, _PROMOTED_METHODS)):
        around(owner, names, _cast_to_widest)
        around(owner, _SEQUENCES, _cast_sequence_to_widest)
    for name in _FLOAT_FUNCTIONS:
        why = f"Cannot call in-place function {name}_ with fp16 arguments."
        around(torch, [f"{name}_"], functools.partial(_refuse_half, why=why, alone=False))
    for name in _FLOAT_METHODS:
        why = f"Cannot call in-place method {name}_ on fp16 Tensors."
        around(torch.Tensor, [f"{name}_"], functools.partial(_refuse_half, why=why, alone=True))
    around(torch.Tensor, [f"{name}_" for name in (*_HALF_METHODS, *_PROMOTED_METHODS)], _cast_like_first)
    patches.set(*kernels.VF_of_rnn.patch(_RecurrentFunctions(kernels.VF_of_rnn.get())))
    patches.set(
        *kernels.rnn_impls.patch({name: layer_in_half(function) for name, function in kernels.rnn_impls.get().items()})
    )
    around(functional, ["binary_cross_entropy"], functools.partial(_refuse_half, why=_BANNED, alone=False))
    casts().active = True
    casts().flag = torch.tensor([0], dtype=torch.int, device="cuda")
    return patches


def suspend_casts(step):
    """Return an optimizer's step in which nothing is cast."""

    def call(self, *args, **kwargs):
        casts().active = False
        result = step(*args, **kwargs)
        casts().active = True
        return result

    return call


_public = register_in("apex.amp.amp", "apex.amp", source="NVIDIA/apex@25.05:apex/amp/amp.py")


@_public
def half_function(fn):
    """Return a function whose arguments are cast to float16, parameters once."""
    return _cast_to_half(fn)


@_public
def float_function(fn):
    """Return a function whose arguments are cast to float32."""
    return _cast_to_float(fn)


@_public
def promote_function(fn):
    """Return a function whose arguments are cast to the widest of their dtypes."""
    return _cast_to_widest(fn)


def _register_wrapper(module, name, wrapped: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    casts().asked.append((module, name, wrapped))


@_public
def register_half_function(module, name):
    """Register `module.name` as half_function does, once amp is initialized at O1."""
    _register_wrapper(module, name, _cast_to_half)


@_public
def register_float_function(module, name):
    """Register `module.name` as float_function does, once amp is initialized at O1."""
    _register_wrapper(module, name, _cast_to_float)


@_public
def register_promote_function(module, name):
    """Register `module.name` as promote_function does, once amp is initialized at O1."""
    _register_wrapper(module, name, _cast_to_widest)
