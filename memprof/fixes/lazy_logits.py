"""Logits that are not computed until an operator needs their values: a tensor with the head's input and weight.

A causal language model multiplies its hidden states with the head, does a little arithmetic (a cast, a soft cap, a
shift by one token, a change of shape) and passes the result to `cross_entropy`. `LazyLogits` represents the product: it
applies shape operations to the hidden states, records the arithmetic, and computes `cross_entropy` chunk by chunk
(head_loss.py). Any other operator computes the full logits, once, exactly as the head would, so that every program gets
a correct result. This works for every architecture and every handwritten loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from memprof.fixes.head_loss import ChunkRows, LogitsStep, row_losses
from memprof.torch_private import tensors
from memprof.torch_private.pytree import tree_map

_Tensor = torch.Tensor
_META = torch.device("meta")


@dataclass
class LogitsPolicy:
    """Settings that all lazy logits of one model share."""

    rows: ChunkRows  # number of rows of logits that are computed at a time
    on_materialize: Callable[[str], None]  # called with an operator's name when the operator needs the full logits


class LazyLogits(torch.Tensor):
    """Tensor that stands for `hidden @ weight.T + bias`, which is not computed until needed (see the module).

    Args:
        hidden: ... x hidden size.
        weight: vocabulary x hidden size.
        bias: vocabulary, or None.
        steps: elementwise operations, in order.
        hooks: functions to call when the backward reaches the logits; none of them changes the gradient.
        class_dim: the dimension of the vocabulary: -1, or 1 after `transpose(1, 2)`.
    """

    _hidden: torch.Tensor
    _weight: torch.Tensor
    _bias: torch.Tensor | None
    _policy: LogitsPolicy
    _steps: tuple[LogitsStep, ...]
    _class_dim: int
    _hooks: tuple[Callable[[torch.Tensor], Any], ...]
    _full: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        policy: LogitsPolicy,
        steps: tuple[LogitsStep, ...] = (),
        class_dim: int = -1,
        hooks: tuple[Callable[[torch.Tensor], Any], ...] = (),
    ) -> LazyLogits:
        dtype = next((step.value for step in reversed(steps) if step.kind == "cast"), hidden.dtype)
        shape = [*hidden.shape[:-1], weight.shape[0]]
        if class_dim == 1:
            shape = [shape[0], shape[2], shape[1]]
        # A meta tensor has no memory. `_HANDLERS` has the getters of its device.
        self: LazyLogits = tensors.make_wrapper_subclass(cls, shape, dtype=dtype, device=_META)
        self._hidden, self._weight, self._bias, self._policy = hidden, weight, bias, policy
        self._steps, self._class_dim, self._hooks, self._full = steps, class_dim, hooks, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(inspect.unwrap(func))  # a virtual GPU wraps some functions
        if handler is not None and args and isinstance(args[0], LazyLogits):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(lambda value: _materialize(value, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on the full logits; called for operators that C++ code calls without `__torch_function__`."""
        args, kwargs = tree_map(lambda value: _materialize(value, str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _materialize(self, "pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return _materialize(self, "deepcopy").__deepcopy__(memo)

    def materialize(self, reason: str) -> torch.Tensor:
        """Return the full logits; the first call computes them and passes `reason` to the policy."""
        if self._full is None or (_requires_grad(self) and torch.is_grad_enabled() and not self._full.requires_grad):
            self._policy.on_materialize(reason)
            x = functional.linear(self._hidden, self._weight, self._bias)
            for step in self._steps:
                x = step.forward(x)
            _register_hooks(x, self._hooks)
            self._full = x if self._class_dim == -1 else x.transpose(1, 2)
        return self._full

    def _copy_with(self, **changes: Any) -> LazyLogits:
        """Return new lazy logits with the constructor arguments of `self`, except for `changes`."""
        names = ("hidden", "weight", "bias", "policy", "steps", "class_dim", "hooks")
        return LazyLogits(**{name: getattr(self, f"_{name}") for name in names} | changes)

    def _with_step(self, step: LogitsStep, in_place: bool = False) -> LazyLogits:
        """Return lazy logits with `step` applied after the others; `in_place` changes `self`."""
        if not in_place:
            return self._copy_with(steps=(*self._steps, step))
        self._steps = (*self._steps, step)
        return self


def _materialize(value: Any, reason: str) -> Any:
    return value.materialize(reason) if isinstance(value, LazyLogits) else value


# A handler returns NotImplemented for arguments that it does not support; then torch gets the full logits.


def _needs_full_logits(self: LazyLogits) -> bool:
    """Return whether operators must use the full logits: these exist, or the vocabulary is not the last dimension."""
    return self._full is not None or self._class_dim != -1


def _requires_grad(self: LazyLogits) -> bool:
    tensors = (self._hidden, self._weight, self._bias)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _make_meta_handler(func: Any) -> Callable[..., Any]:
    """Return a handler that calls `func` on `LazyLogits` as a meta tensor, with the shape and dtype of the logits."""

    def call_on_meta(*args: Any, **kwargs: Any) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return call_on_meta


def _detach(self: LazyLogits) -> Any:
    if _needs_full_logits(self):
        return NotImplemented
    bias = None if self._bias is None else self._bias.detach()
    return self._copy_with(hidden=self._hidden.detach(), weight=self._weight.detach(), bias=bias, hooks=())


def _reshape(self: LazyLogits, *sizes: Any, **kwargs: Any) -> Any:
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else ()
    if _needs_full_logits(self) or kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    shape = list(sizes)
    if shape.count(-1) == 1:
        known_size = math.prod(size for size in shape if size != -1)
        if not known_size or self.numel() % known_size:
            return NotImplemented
        shape[shape.index(-1)] = self.numel() // known_size
    if shape[-1] != self.shape[-1] or math.prod(shape) != self.numel():
        return NotImplemented
    return self._copy_with(hidden=self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]))


def _flatten(self: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = self.dim()
    if _needs_full_logits(self) or end_dim % dims == dims - 1:
        return NotImplemented
    return self._copy_with(hidden=self._hidden.flatten(start_dim % dims, end_dim % dims))


def _unsqueeze(self: LazyLogits, dim: int) -> Any:
    position = dim % (self.dim() + 1)
    if _needs_full_logits(self) or position == self.dim():
        return NotImplemented
    return self._copy_with(hidden=self._hidden.unsqueeze(position))


def _squeeze(self: LazyLogits, *dims: Any) -> Any:
    if (
        _needs_full_logits(self)
        or len(dims) != 1
        or not isinstance(dims[0], int)
        or dims[0] % self.dim() == self.dim() - 1
    ):
        return NotImplemented
    return self._copy_with(hidden=self._hidden.squeeze(dims[0] % self.dim()))


def _transpose(self: LazyLogits, dim0: Any, dim1: Any) -> Any:
    """Move the vocabulary to dimension 1, as `cross_entropy` expects it: batch x vocabulary x tokens."""
    if _needs_full_logits(self) or self.dim() != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
        return NotImplemented
    return self._copy_with(class_dim=1)


def _permute(self: LazyLogits, *dims: Any) -> Any:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return _transpose(self, 1, 2) if [dim % 3 for dim in dims] == [0, 2, 1] else NotImplemented


def _getitem(self: LazyLogits, index: Any) -> Any:
    if _needs_full_logits(self):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    masks = [isinstance(item, _Tensor) and item.dtype in (torch.bool, torch.uint8) for item in items]
    dims = [0 if p is None or p is Ellipsis else p.dim() if mask else 1 for p, mask in zip(items, masks, strict=True)]
    if any(isinstance(item, list) for item in items) or sum(item is Ellipsis for item in items) > 1:
        return NotImplemented
    num_missing = self.dim() - sum(dims)
    if any(item is Ellipsis for item in items):
        ellipsis_index = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[ellipsis_index : ellipsis_index + 1] = [slice(None)] * num_missing
    elif num_missing:
        items += [slice(None)] * num_missing
    *row_items, column_slice = items
    if not isinstance(column_slice, slice) or column_slice.step not in (None, 1):
        return NotImplemented
    start, end, _ = column_slice.indices(self.shape[-1])
    hidden = self._hidden[(*row_items, slice(None))] if row_items else self._hidden
    if (start, end) == (0, self.shape[-1]):
        return self._copy_with(hidden=hidden)
    bias = None if self._bias is None else self._bias[start:end]
    return self._copy_with(hidden=hidden, weight=self._weight[start:end], bias=bias)


def _make_cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: NotImplemented if args or kwargs else _to_dtype(self, dtype)


def _to_dtype(self: LazyLogits, dtype: torch.dtype) -> Any:
    if _needs_full_logits(self) or not dtype.is_floating_point:
        return NotImplemented
    return self if dtype == self.dtype else self._with_step(LogitsStep("cast", dtype))


def _to(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    targets = [*args, *(value for name, value in kwargs.items() if name in ("dtype", "device"))]
    dtype = self.dtype
    for value in targets:
        if isinstance(value, _Tensor):
            dtype, value = value.dtype, value.device
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)):
            device = torch.device(value)
            current_device = self._hidden.device
            if device.type != current_device.type or device.index not in (None, current_device.index):
                return NotImplemented
        elif value is not None and not isinstance(value, bool):
            return NotImplemented
    if kwargs.get("copy"):
        return NotImplemented
    return _to_dtype(self, dtype)


def _make_arithmetic(kind: str, *, negate: bool = False, in_place: bool = False) -> Callable[..., Any]:
    def operate(self: LazyLogits, value: Any, **kwargs: Any) -> Any:
        if _needs_full_logits(self) or kwargs or not _is_scalar(value):
            return NotImplemented
        if isinstance(value, _Tensor):
            value = value.detach()
        return self._with_step(LogitsStep(kind, -value if negate else value), in_place)

    return operate


def _is_scalar(value: Any) -> bool:
    """Return whether `value` is an int or float, or a 0-dimensional tensor that requires no gradient."""
    if isinstance(value, _Tensor):
        return not isinstance(value, LazyLogits) and value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _register_hook(self: LazyLogits, hook: Callable[[torch.Tensor], Any]) -> Any:
    """Register `hook` if it is fully_shard's, which leaves the gradient unchanged; other hooks need the full logits."""
    module = type(getattr(hook, "__self__", None)).__module__
    if _needs_full_logits(self) or not module.startswith("torch.distributed.fsdp."):
        return NotImplemented
    self._hooks = (*self._hooks, hook)
    return None


def _register_hooks(tensor: torch.Tensor, hooks: tuple[Callable[[torch.Tensor], Any], ...]) -> None:
    if tensor.requires_grad:
        for hook in hooks:
            tensor.register_hook(hook)


def _make_tanh(in_place: bool) -> Callable[..., Any]:
    return lambda self: NotImplemented if _needs_full_logits(self) else self._with_step(LogitsStep("tanh"), in_place)


def _cross_entropy(
    self: LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    rows_shape = self._hidden.shape[:-1]
    has_unsupported = weight is not None or size_average is not None or reduce is not None
    if has_unsupported or self._full is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if not isinstance(target, _Tensor) or target.dtype != torch.int64 or target.shape != rows_shape:
        return NotImplemented
    if not 0 <= label_smoothing <= 1 or target.device != self._hidden.device:
        return NotImplemented
    losses = row_losses(
        self._hidden.reshape(-1, self._hidden.shape[-1]),
        self._weight,
        self._bias,
        target.reshape(-1),
        steps=self._steps,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        rows=self._policy.rows,
    )
    _register_hooks(losses, self._hooks)
    if reduction == "none":
        return losses.to(self.dtype).view(target.shape)
    total = losses.sum()
    # If all rows are ignored, 0 / 0 is nan, as in torch, and there is no gradient.
    return (total if reduction == "sum" else total / (target != ignore_index).sum()).to(self.dtype)


_NAMESPACES = (_Tensor, torch)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        getattr(_Tensor, name).__get__: lambda self, name=name: getattr(self._hidden, name)
        for name in ("device", "is_cuda", "is_cpu", "is_meta")
    },
    _Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    tensors.base_of_tensor.__get__: lambda self: NotImplemented if _needs_full_logits(self) else None,  # type: ignore[union-attr]
    _Tensor.register_hook: _register_hook,
    **{
        func: _make_meta_handler(func)
        for func in (
            *(getattr(_Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "is_sparse", "itemsize")),
            *(getattr(_Tensor, name) for name in ("size", "dim", "nelement", "__len__", "element_size")),
            *(getattr(owner, name) for owner in _NAMESPACES for name in ("numel", "is_floating_point", "is_complex")),
        )
    },
    **{
        getattr(owner, name): handler
        for owner in _NAMESPACES
        for name, handler in (
            ("detach", _detach),
            ("reshape", _reshape),
            ("flatten", _flatten),
            ("unsqueeze", _unsqueeze),
            ("squeeze", _squeeze),
            ("transpose", _transpose),
            ("permute", _permute),
            ("tanh", _make_tanh(False)),
            ("tanh_", _make_tanh(True)),
        )
    },
    functional.tanh: _make_tanh(False),
    _Tensor.contiguous: lambda self, *args, **kwargs: NotImplemented if args or kwargs else self,
    _Tensor.view: _reshape,
    _Tensor.mT.__get__: lambda self: _transpose(self, 1, 2),  # type: ignore[attr-defined]
    _Tensor.__getitem__: _getitem,
    **{getattr(_Tensor, name): _make_cast(getattr(torch, name)) for name in ("float", "double", "half", "bfloat16")},
    _Tensor.to: _to,
    _Tensor.type_as: _to,
    **{
        getattr(owner, name + mark): _make_arithmetic(kind, negate=name.startswith("sub"), in_place=bool(mark))
        for kind, names in (
            ("mul", ("mul", "multiply")),
            ("div", ("div", "divide", "true_divide")),
            ("add", ("add", "sub", "subtract")),
        )
        for name in names
        for owner, mark in ((_Tensor, ""), (torch, ""), (_Tensor, "_"))
    },
    functional.cross_entropy: _cross_entropy,
}
# A virtual GPU that was created before this import has wrapped some functions.
_HANDLERS = {inspect.unwrap(function): handler for function, handler in _HANDLERS.items()}
