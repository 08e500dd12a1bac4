"""apex.amp at O1: casts around PyTorch's functions and methods, by lists of Apex's own, until the run ends.

Sources: apex/amp/amp.py (init, and the functions that a program registers), wrap.py, utils.py, rnn_compat.py and
lists/ of NVIDIA/apex@25.05. A parameter in float32 that goes into a function of half precision is cast once until
`scale_loss` ends. Who calls memprof's own code calls a kernel: what that calls is not cast.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from memprof.patching.patch_set import PatchSet
from memprof.stand_ins.registry import stand_in
from memprof.stand_ins.tools import kept
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
        self.flag: torch.Tensor | None = None
        """Of overflows: the handle has a scaler that nobody uses."""
        self.asked: list[tuple[Any, str, str]] = []
        """What the program registers before `initialize`: module, name, and "half", "float" or "widest"."""


def casts() -> Casts:
    """Those of this run."""
    return kept("apex.amp.casts", Casts)


# -- what is cast ---------------------------------------------------------------------------------------------------


def _half(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float16 or not x.is_cuda else x.half()


def _float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float32 or not x.is_cuda else x.float()


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of floating-point numbers, in an argument that has no others."""
    leaves = list(_leaves(value))
    if all(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves):
        yield from leaves


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _cast(how: _Cast, value: Any) -> Any:
    """An argument, if it has nothing but tensors of floating-point numbers."""
    if isinstance(value, torch.Tensor):
        return how(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)) and any(True for _ in _floats(value)):
        return _rebuilt(how, value)
    return value


def _rebuilt(how: _Cast, value: Any) -> Any:
    return type(value)([_rebuilt(how, each) for each in value]) if isinstance(value, (tuple, list)) else how(value)


def _remembered(value: Any) -> Any:
    """A parameter in float32 as it was cast before; whether it needs a gradient has to be the same while there are."""
    if not isinstance(value, torch.nn.Parameter) or value.dtype != torch.float32 or not value.is_cuda:
        return value
    cache = casts().cache
    found = cache.get(value)
    if found is None or (torch.is_grad_enabled() and value.requires_grad != found.requires_grad):
        found = cache[value] = value.half()
    return found


def _dtypes(args: Iterable[Any]) -> set[torch.dtype]:
    return {tensor.dtype for value in args for tensor in _floats(value)}


# -- wrappers -------------------------------------------------------------------------------------------------------


def _is_inside() -> bool:
    """Whether memprof itself calls a patched function: for a kernel, whose own code nothing is cast in."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("memprof.")


def _to(function: Any, how: _Cast) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not casts().active or _is_inside():
            return function(*args, **kwargs)
        if how is _half:
            args = tuple(map(_remembered, args))
            kwargs = {name: _remembered(value) for name, value in kwargs.items()}
        return function(*(_cast(how, arg) for arg in args), **{name: _cast(how, arg) for name, arg in kwargs.items()})

    return call


def _to_widest(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not casts().active or _is_inside():
            return function(*args, **kwargs)
        found = _dtypes((*args, *kwargs.values()))
        if len(found) <= 1:
            return function(*args, **kwargs)
        if found != {torch.float16, torch.float32}:
            raise NotImplementedError(f"Do not know how to handle these types to promote: {found}")
        args = tuple(_cast(_float, arg) for arg in args)
        return function(*args, **{name: _cast(_float, arg) for name, arg in kwargs.items()})

    return call


def _sequence_to_widest(function: Any) -> Any:
    @functools.wraps(function)
    def call(seq: Any, *args: Any, **kwargs: Any) -> Any:
        if casts().active and not _is_inside() and {x.dtype for x in seq} == {torch.float16, torch.float32}:
            seq = [_cast(_float, x) for x in seq]
        return function(seq, *args, **kwargs)

    return call


def _to_first(function: Any) -> Any:
    @functools.wraps(function)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        how = {torch.float16: _half, torch.float32: _float}.get(first.dtype)
        if casts().active and how is not None and not _is_inside():
            args = tuple(_cast(how, arg) for arg in args)
            kwargs = {name: _cast(how, arg) for name, arg in kwargs.items()}
        return function(first, *args, **kwargs)

    return call


def _not_in_half(function: Any, why: str, *, alone: bool) -> Any:
    """`alone`: the first argument decides, and the others are cast to float32."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_inside():
            return function(*args, **kwargs)
        asked = args[:1] if alone else (*args, *kwargs.values())
        if any(x.is_cuda and x.dtype == torch.float16 for value in asked for x in _floats(value)):
            raise NotImplementedError(why)
        if alone:
            args = (*args[:1], *(_cast(_float, arg) for arg in args[1:]))
            kwargs = {name: _cast(_float, arg) for name, arg in kwargs.items()}
        return function(*args, **kwargs)

    return call


class _Layers:
    """torch.nn.modules.rnn's `_VF`: cells are cast as functions are; layers take weights that lie in one new tensor."""

    def __init__(self, real: Any) -> None:
        self._real = real
        for name in _LAYERS:
            setattr(self, f"{name}_cell", _to(getattr(real, f"{name}_cell"), _half))
            setattr(self, name, layer_in_half(getattr(real, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def layer_in_half(function: Any) -> Any:
    """A recurrent layer whose weights are copied, in half precision, into one tensor at each call."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not casts().active:
            return function(*args)
        places = 2 if isinstance(args[6], bool) else 3  # the other way with a packed sequence
        weights, taken = args[places], 0
        flat = args[0].new_empty((sum(weight.numel() for weight in weights),), dtype=torch.half)
        copies = []
        for weight in weights:
            copy = weight.new_empty(0, dtype=torch.half).set_(flat.untyped_storage(), taken, weight.shape)
            copies.append(copy.copy_(weight))
            taken += weight.numel()
        return function(*(copies if at == places else _cast(_half, arg) for at, arg in enumerate(args)))

    return call


# -- where they are put ---------------------------------------------------------------------------------------------


def install() -> PatchSet:
    """Put the casts around everything; undone by what is returned."""
    patches = PatchSet()

    def around(owner: Any, names: Iterable[str], wrapped: Callable[[Any], Any]) -> None:
        for name in names:
            if hasattr(owner, name):
                patches.set(owner, name, wrapped(getattr(owner, name)))

    kinds: dict[str, Callable[[Any], Any]] = {
        "half": functools.partial(_to, how=_half), "float": functools.partial(_to, how=_float), "widest": _to_widest,
    }  # fmt: skip
    half, single, widest = kinds["half"], kinds["float"], kinds["widest"]
    for module, name, kind in casts().asked:
        around(module, [name], kinds[kind])
    casts().asked.clear()
    around(functional, [*_CONVOLUTIONS, "linear"], half)
    around(functional, _FLOAT_OF_MODULES, single)
    around(torch, _HALF_FUNCTIONS, half)
    around(torch, _FLOAT_FUNCTIONS, single)
    around(torch.Tensor, _HALF_METHODS, half)
    around(torch.Tensor, _FLOAT_METHODS, single)
    for owner, names in ((torch, _PROMOTED_FUNCTIONS), (torch.Tensor, _PROMOTED_METHODS)):
        around(owner, names, widest)
        around(owner, _SEQUENCES, _sequence_to_widest)
    for name in _FLOAT_FUNCTIONS:
        why = f"Cannot call in-place function {name}_ with fp16 arguments."
        around(torch, [f"{name}_"], functools.partial(_not_in_half, why=why, alone=False))
    for name in _FLOAT_METHODS:
        why = f"Cannot call in-place method {name}_ on fp16 Tensors."
        around(torch.Tensor, [f"{name}_"], functools.partial(_not_in_half, why=why, alone=True))
    around(torch.Tensor, [f"{name}_" for name in (*_HALF_METHODS, *_PROMOTED_METHODS)], _to_first)
    patches.set(*kernels.VF_of_rnn.patch(_Layers(kernels.VF_of_rnn.get())))
    patches.set(
        *kernels.rnn_impls.patch({name: layer_in_half(function) for name, function in kernels.rnn_impls.get().items()})
    )
    around(functional, ["binary_cross_entropy"], functools.partial(_not_in_half, why=_BANNED, alone=False))
    casts().active = True
    casts().flag = torch.tensor([0], dtype=torch.int, device="cuda")
    return patches


def without(step: Any) -> Any:
    """A step of an optimizer, in which nothing is cast."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts().active = False
        result = step(*args, **kwargs)
        casts().active = True
        return result

    return call


# -- what a program casts by itself ----------------------------------------------------------------------------------


def _public(name: str) -> Callable[[Any], Any]:
    return stand_in(f"apex.amp.amp.{name}", f"apex.amp.{name}", source="NVIDIA/apex@25.05:apex/amp/amp.py")


@_public("half_function")
def half_function(fn: Any) -> Any:
    """A function whose arguments are cast to float16, parameters once."""
    return _to(fn, _half)


@_public("float_function")
def float_function(fn: Any) -> Any:
    """A function whose arguments are cast to float32."""
    return _to(fn, _float)


@_public("promote_function")
def promote_function(fn: Any) -> Any:
    """A function whose arguments are cast to the widest of their types."""
    return _to_widest(fn)


def _ask(module: Any, name: Any, kind: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    casts().asked.append((module, name, kind))


@_public("register_half_function")
def register_half_function(module: Any, name: Any) -> None:
    """As half_function, for `module.name`, once amp is initialized at O1."""
    _ask(module, name, "half")


@_public("register_float_function")
def register_float_function(module: Any, name: Any) -> None:
    """As float_function, for `module.name`, once amp is initialized at O1."""
    _ask(module, name, "float")


@_public("register_promote_function")
def register_promote_function(module: Any, name: Any) -> None:
    """As promote_function, for `module.name`, once amp is initialized at O1."""
    _ask(module, name, "widest")
