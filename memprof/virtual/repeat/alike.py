"""Whether two layers are the same but for the numbers in their weights: told from all that they hold, not from names.

What their code does with it is seen when it runs. One thing is left that differs in each layer by its nature, its own
number: that its code does not look at it is seen too (spies.py).
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from memprof.virtual.repeat.spies import Numbers
from memprof.virtual.values import Values

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_COMPARED = {"_modules", "_parameters", "_buffers", *_HOOKS}
_OF_STATE_DICTS = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
"""Called when weights are saved and loaded, which no layer does."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, torch.Size)
_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)


class Comparison:
    """Compares layers of one stack.

    Args:
        values: what is known of the numbers in tensors.
        root: the model that they are in.
    """

    def __init__(self, values: Values, root: nn.Module) -> None:
        self._values = values
        self._numbers_matter = True
        self._uses = Counter(_address(tensor) for tensor in _tensors(root) if tensor is not None)
        self._places = (0, 0)
        self._paths: dict[int, str] | None = None
        """Of the parts of both layers; None: nobody has asked yet."""
        self._layers: tuple[nn.Module, ...] = ()
        self._met: set[tuple[int, int]] = set()
        self.numbers: Numbers = set()
        """Of the layers that were compared."""

    def is_alike(self, one: tuple[nn.Module, int], other: tuple[nn.Module, int], *, numbers: bool) -> bool:
        """Whether two layers, each with its place in the stack, are alike; `numbers`: those in their weights too."""
        self._places, self._numbers_matter = (one[1], other[1]), numbers
        self._met.clear()
        self._layers, self._paths = (one[0], other[0]), None
        try:
            return self._modules_alike(one[0], other[0], "")
        finally:
            self._layers = ()

    def _modules_alike(self, one: nn.Module, other: nn.Module, path: str) -> bool:
        if type(one) is not type(other) or list(one._modules) != list(other._modules):
            return False
        mine, its = vars(one), vars(other)
        if list(mine) != list(its) or any(mine.get(name) or its.get(name) for name in _HOOKS):
            return False
        for names in ("_parameters", "_buffers"):
            if list(mine[names]) != list(its[names]):
                return False
            if not all(map(self._tensors_alike, mine[names].values(), its[names].values())):
                return False
        for name, value in mine.items():
            if name in _COMPARED or name in _OF_STATE_DICTS or value is its[name]:
                continue
            if type(value) is type(its[name]) is int and (value, its[name]) == self._places:
                self.numbers.add((path, name))
            elif not self._alike(value, its[name]):
                return False
        return all(
            left is right
            or (left is not None and right is not None and self._modules_alike(left, right, f"{path}.{name}"))
            for (name, left), right in zip(one._modules.items(), other._modules.values(), strict=True)
        )

    def _tensors_alike(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        """Whether two weights are: each is in memory that no other module has."""
        if one is None or other is None:
            return one is other
        if any(self._uses[_address(tensor)] != 1 for tensor in (one, other)):
            return False
        return self._alike(one, other)

    def _alike(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        kind = type(one)
        if kind is not type(other):
            return False
        if issubclass(kind, _PLAIN):
            return bool(one == other) or (kind is str and self._are_names(one, other))
        if issubclass(kind, nn.Module):  # another name of a part of the layer
            if self._paths is None:
                self._paths = {id(part): path for layer in self._layers for path, part in layer.named_modules()}
            path = self._paths.get(id(one))
            return path is not None and path == self._paths.get(id(other))
        if issubclass(kind, _CODE):
            return False
        if (id(one), id(other)) in self._met:
            return True
        self._met.add((id(one), id(other)))
        if issubclass(kind, torch.Tensor):
            return (
                layout_of(one) == layout_of(other)
                and self._values.are_same(one, other, only_known=not self._numbers_matter)
                and self._parts_alike(one, other)
            )
        if issubclass(kind, dict):
            return list(one) == list(other) and all(map(self._alike, one.values(), other.values()))
        if issubclass(kind, (list, tuple)):
            return len(one) == len(other) and all(map(self._alike, one, other))
        if issubclass(kind, (set, frozenset)):
            return all(isinstance(value, _PLAIN) for value in one) and bool(one == other)
        if issubclass(kind, MethodType):
            return one.__func__ is other.__func__ and self._alike(one.__self__, other.__self__)
        if issubclass(kind, functools.partial):
            return self._alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        # An object of the program's own; what keeps nothing in a dictionary cannot be seen.
        return hasattr(one, "__dict__") and not has_slots(kind) and self._parts_alike(one, other)

    def _are_names(self, one: str, other: str) -> bool:
        """Whether two texts are the same path, each through its own layer."""
        mine, its = one.split("."), other.split(".")
        places = tuple(map(str, self._places))
        return len(mine) == len(its) > 1 and all(
            left == right or (left, right) == places for left, right in zip(mine, its, strict=True)
        )

    def _parts_alike(self, one: Any, other: Any) -> bool:
        mine, its = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
        derived = getattr(type(one), "DERIVED", ())
        return list(mine) == list(its) and all(
            self._alike(mine[name], its[name]) for name in mine if name not in derived
        )


def has_slots(kind: type) -> bool:
    """Whether objects of `kind` hold anything beside their dictionary."""
    own = {"__dict__", "__weakref__"}
    return kind.__basicsize__ > _Plain.__basicsize__ or any(
        set(vars(base).get("__slots__", ())) - own for base in kind.__mro__
    )


class _Plain:
    """A class like any other."""


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that decides what operators do with a tensor beside its numbers, its memory and its history."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (
        type(tensor),
        tensor.layout,
        tensor.size(),
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj() or tensor.is_neg(),
        tensor.storage_offset() if tensor.layout is torch.strided else None,
        tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else object(),
        object() if hooks else None,
    )


def _tensors(root: nn.Module) -> Iterator[torch.Tensor | None]:
    for module in root.modules():
        yield from module._parameters.values()
        yield from module._buffers.values()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
