"""Store of the known values of each virtual storage, and of tokens chosen by unknown scores.

A token that unknown scores have chosen is a placeholder, which differs from every token that the program names (the end
of a text, padding). `ChosenTokens` records which tensors hold placeholders, also in integers computed from them.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.operator_call import find_tensors
from memprof.virtual.values import budget, unknown_values
from memprof.virtual.values.budget import is_cheap_to_compute
from memprof.virtual.values.shadows import ComputeElements, Shadow, TensorLayout, make_zeros

# Operators by which a program compares tokens with a token that it names.
_COMPARISONS = frozenset({torch.ops.aten.eq, torch.ops.aten.ne, torch.ops.aten.isin, torch.ops.aten.equal})


class ValueStore:
    """Known values of tensors, by the address of their storage.

    A storage has either all elements (a `Shadow`), or one value that all elements have, or, for a mask that is too
    large to compute, a density: the fraction of the elements that is true, spread evenly.
    """

    def __init__(self) -> None:
        self._shadows: dict[int, Shadow] = {}
        self._uniform: dict[int, torch.Tensor] = {}
        self._densities: dict[int, float] = {}
        self._shadow_bytes = 0
        self.tokens = ChosenTokens()

    def drop(self, address: int) -> None:
        """Forget the values of the storage at `address`, which was freed or has unknown values now."""
        shadow = self._shadows.pop(address, None)
        if shadow is not None:
            self._shadow_bytes -= shadow.num_bytes
        self._uniform.pop(address, None)
        self._densities.pop(address, None)
        self.tokens.drop(address)

    def is_known(self, address: int) -> bool:
        """Return whether the storage at `address` has known values or a known density."""
        return address in self._shadows or address in self._uniform or address in self._densities

    def can_read(self, value: Any) -> bool:
        """Return whether the values of `value` are known or can be computed; True if `value` is no meta tensor."""
        if not isinstance(value, torch.Tensor) or not value.is_meta or not value.numel():
            return True
        address = value.untyped_storage()._cdata
        return address in self._shadows or address in self._uniform

    def is_trackable(self, tensor: torch.Tensor) -> bool:
        """Return whether the budget allows a shadow for `tensor`."""
        if is_cheap_to_compute(tensor):
            return True
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes <= budget.MAX_TENSOR_BYTES and self._shadow_bytes + num_bytes <= budget.MAX_SHADOW_BYTES

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU tensor with the values of `tensor`, or `tensor` if it is not a meta tensor; None if unknown."""
        if not tensor.is_meta:
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        uniform = self._uniform.get(tensor.untyped_storage()._cdata)
        if uniform is not None and uniform.dtype == tensor.dtype:
            return uniform.expand(tensor.shape)
        flat = self.read_elements(tensor.untyped_storage())
        return None if flat is None else TensorLayout.from_tensor(tensor).view_elements(flat)

    def read_elements(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return all elements of `storage`, [num_elements], in the memory of its shadow; None if they are unknown."""
        value = self._uniform.get(storage._cdata)
        if value is not None:
            if value != 0 and storage.nbytes() > budget.MAX_TENSOR_BYTES:
                return None
            self.materialize(storage)
        shadow = self._shadows.get(storage._cdata)
        flat = None if shadow is None else shadow.read()
        if shadow is not None and flat is not None and not shadow.num_bytes:
            shadow.num_bytes = storage.nbytes()  # the elements take memory from now on
            self._shadow_bytes += shadow.num_bytes
        return flat

    def get_shadow(self, tensor: torch.Tensor) -> Shadow | None:
        """Return the shadow of the storage of a meta tensor; None if the storage has no shadow."""
        return self._shadows.get(tensor.untyped_storage()._cdata)

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Record that `tensor`, which covers its entire storage, has the values of `value` (same shape and dtype)."""
        if not tensor.numel():
            return
        if value.numel() == 1 or (value.dim() and not any(value.stride())):
            self.set_uniform(tensor, value.as_strided((), ()) if value.dim() else value)
            return
        self.set_elements(tensor.untyped_storage(), TensorLayout.from_tensor(tensor).fill_storage(value))

    def set_elements(
        self, storage: torch.UntypedStorage, flat: torch.Tensor | None, compute: ComputeElements | None = None
    ) -> Shadow:
        """Record that `storage` holds the elements `flat`, or those that `compute` returns when they are read."""
        self.drop(storage._cdata)
        return self._add_shadow(storage, Shadow(0 if compute else storage.nbytes(), flat, compute))

    def _add_shadow(self, storage: torch.UntypedStorage, shadow: Shadow) -> Shadow:
        self._shadows[storage._cdata] = shadow
        self._shadow_bytes += shadow.num_bytes
        return shadow

    def get_writable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU tensor with the values of `tensor`, through whose memory the program may write to `tensor`; None
        if the values are unknown."""
        flat = self.make_writable(tensor.untyped_storage())
        return None if flat is None else self.get(tensor)

    def make_writable(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return all elements of `storage`, [num_elements], to be changed in place; None if they are unknown. Deferred
        operators still read the old elements."""
        flat, shadow = self.read_elements(storage), self._shadows.get(storage._cdata)
        if flat is not None and shadow is not None and shadow.has_pending_readers:
            flat = flat.clone()
            self._shadows[storage._cdata] = Shadow(shadow.num_bytes, flat)
        return flat

    def is_uniform(self, tensor: torch.Tensor) -> bool:
        """Return whether all elements of `tensor` are known to be equal."""
        return tensor.untyped_storage()._cdata in self._uniform

    def set_uniform(self, tensor: torch.Tensor, value: Any) -> None:
        """Record that all elements of `tensor`, which covers its storage, equal `value`, a number or 0-d tensor."""
        if tensor.numel():
            address, dtype = tensor.untyped_storage()._cdata, tensor.dtype
            self.drop(address)
            is_tensor = isinstance(value, torch.Tensor)
            self._uniform[address] = value.to(dtype, copy=True) if is_tensor else torch.full((), value, dtype=dtype)

    def get_uniform_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of all elements as a 0-dimensional tensor; None if the elements differ or are unknown."""
        if not tensor.is_meta:
            return tensor.reshape(()) if tensor.numel() == 1 else None
        value = self._uniform.get(tensor.untyped_storage()._cdata)
        if value is None and tensor.numel() == 1:
            value = self.get(tensor)
        return None if value is None or value.dtype != tensor.dtype else value.reshape(())

    def materialize(self, storage: torch.UntypedStorage) -> None:
        """Replace the value recorded for all elements of `storage` by a shadow with each element."""
        value = self._uniform.pop(storage._cdata)
        flat = make_zeros(storage.nbytes() // value.element_size(), value.dtype)
        if value != 0:
            flat.fill_(value)
        self._add_shadow(storage, Shadow(storage.nbytes(), flat))

    def get_density(self, tensor: torch.Tensor) -> float | None:
        """Return the fraction (0 to 1) of true elements of a mask; None unless only this fraction is known."""
        return self._densities.get(tensor.untyped_storage()._cdata)

    def set_density(self, tensor: torch.Tensor, density: float) -> None:
        """Record that a fraction `density` (0 to 1) of the elements of a mask are true, spread evenly."""
        self._densities[tensor.untyped_storage()._cdata] = density


class ChosenTokens:
    """Ranges of integers that stand for chosen tokens (placeholders), by the address of the storage with them."""

    def __init__(self) -> None:
        self._placeholders: dict[int, range] = {}

    def drop(self, address: int) -> None:
        """Forget the placeholders in the storage at `address`, which was freed or overwritten."""
        self._placeholders.pop(address, None)

    def find_placeholders(self, value: Any) -> range:
        """Return the range of placeholders in `value`, a tensor or a collection of tensors; empty if there are none."""
        if not self._placeholders:
            return range(0)
        candidates = [self._placeholders.get(t.untyped_storage()._cdata) for t in find_tensors(value) if t.is_meta]
        ranges = [placeholders for placeholders in candidates if placeholders]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else range(0)

    def mark_placeholders(self, tensor: torch.Tensor, placeholders: range) -> None:
        """Record that `tensor` may have elements in the range `placeholders`, which stand for chosen tokens."""
        if placeholders:
            self._placeholders[tensor.untyped_storage()._cdata] = placeholders

    def propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Record that the integer tensors in `outputs` of `func` may have the placeholders of its arguments."""
        if not self._placeholders:
            return
        inputs = args[1:] if func.overloadpacket in unknown_values.UNIFORM_FILLS else args
        placeholders = self.find_placeholders([*inputs, *kwargs.values()])
        for tensor in outputs:
            if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
                self.mark_placeholders(tensor, placeholders)

    def mask_comparison(self, func: Any, args: Any, inputs: Any, result: Any) -> Any:
        """Return `result` of `func`; if `func` compares `inputs`, changed so that placeholders equal no other token."""
        if not self._placeholders or func.overloadpacket not in _COMPARISONS:
            return result
        left, right = (self.find_placeholders([arg]) for arg in args[:2])
        if bool(left) == bool(right):
            return result
        tokens, placeholders = torch.as_tensor(inputs[0]), left or right
        is_placeholder = (tokens >= placeholders.start) & (tokens < placeholders.stop)
        return result | is_placeholder if func.overloadpacket is torch.ops.aten.ne else result & ~is_placeholder
