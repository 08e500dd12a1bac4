"""The known contents of each storage on the virtual GPU, chosen tokens among it.

A token that unknown scores have chosen is a number that stands for many. It is followed through integers made of it, so
that a comparison with a token that the program names (the end of a text, padding) finds it unlike.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.operator_call import find_tensors
from memprof.virtual.values import budget, unknown_values
from memprof.virtual.values.budget import is_cheap_to_compute
from memprof.virtual.values.shadows import Make, Shadow, TensorLayout, untouched

# By which a program asks whether a token is one that it names.
_COMPARISONS = frozenset({torch.ops.aten.eq, torch.ops.aten.ne, torch.ops.aten.isin, torch.ops.aten.equal})


class ValueStore:
    """Keeps the values of tensors, by the address of their storage.

    Of a storage it has either all elements in a row (a `Shadow`), or the one value that all of them have, or, of a mask
    that is too large to compute, its density alone: the part of its elements that is true, spread evenly.
    """

    def __init__(self) -> None:
        self._shadows: dict[int, Shadow] = {}
        self._uniform: dict[int, torch.Tensor] = {}
        self._densities: dict[int, float] = {}
        self._held_bytes = 0
        self.tokens = ChosenTokens()

    def drop(self, address: int) -> None:
        """Forget the storage at `address`: it died, or its contents are no longer known."""
        shadow = self._shadows.pop(address, None)
        if shadow is not None:
            self._held_bytes -= shadow.num_bytes
        self._uniform.pop(address, None)
        self._densities.pop(address, None)
        self.tokens.drop(address)

    def knows(self, address: int) -> bool:
        """Return whether something is known of the storage at `address`, if only its density."""
        return address in self._shadows or address in self._uniform or address in self._densities

    def may_have(self, value: Any) -> bool:
        """Return whether the values of a tensor are known, or may be once they are computed; of anything else, True."""
        if not isinstance(value, torch.Tensor) or not value.is_meta or not value.numel():
            return True
        address = value.untyped_storage()._cdata
        return address in self._shadows or address in self._uniform

    def is_trackable(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of this dtype and size is worth keeping, and there is room for it."""
        if is_cheap_to_compute(tensor):
            return True
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes <= budget.MAX_TENSOR_BYTES and self._held_bytes + num_bytes <= budget.MAX_SHADOW_BYTES

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor behind `tensor` (a real tensor is its own), None if its contents are not known."""
        if not tensor.is_meta:
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        uniform = self._uniform.get(tensor.untyped_storage()._cdata)
        if uniform is not None and uniform.dtype == tensor.dtype:
            return uniform.expand(tensor.shape)
        flat = self.flat(tensor.untyped_storage())
        return None if flat is None else TensorLayout.of(tensor).view(flat)

    def flat(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return what the whole of `storage` holds, in memory of its own; None if that is not known."""
        value = self._uniform.get(storage._cdata)
        if value is not None:
            if value != 0 and storage.nbytes() > budget.MAX_TENSOR_BYTES:
                return None
            self.materialize(storage)
        shadow = self._shadows.get(storage._cdata)
        flat = None if shadow is None else shadow.flat()
        if shadow is not None and flat is not None and not shadow.num_bytes:
            shadow.num_bytes = storage.nbytes()  # now that it is made
            self._held_bytes += shadow.num_bytes
        return flat

    def shadow_of(self, tensor: torch.Tensor) -> Shadow | None:
        """Return the elements of the storage of a tensor on torch's meta device, which may have to be computed."""
        return self._shadows.get(tensor.untyped_storage()._cdata)

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Say that `tensor`, which owns its whole storage, holds `value` (of the same shape and dtype)."""
        if not tensor.numel():
            return
        if value.numel() == 1 or (value.dim() and not any(value.stride())):
            self.set_uniform(tensor, value.as_strided((), ()) if value.dim() else value)
            return
        self.keep(tensor.untyped_storage(), TensorLayout.of(tensor).spread(value))

    def keep(self, storage: torch.UntypedStorage, flat: torch.Tensor | None, make: Make | None = None) -> Shadow:
        """Say that `storage` holds these elements in a row, or what `make` gives when they are read."""
        self.drop(storage._cdata)
        return self._hold(storage, Shadow(0 if make else storage.nbytes(), flat, make))

    def _hold(self, storage: torch.UntypedStorage, shadow: Shadow) -> Shadow:
        self._shadows[storage._cdata] = shadow
        self._held_bytes += shadow.num_bytes
        return shadow

    def writable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor behind `tensor` in memory that the program may write to; what it writes is what the
        tensor holds. None if its contents are not known."""
        flat = self.make_writable(tensor.untyped_storage())
        return None if flat is None else self.get(tensor)

    def make_writable(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return what the whole of `storage` holds, to be changed: what is yet to be computed of it still reads what it
        held before. None if that is not known."""
        flat, shadow = self.flat(storage), self._shadows.get(storage._cdata)
        if flat is not None and shadow is not None and shadow.has_pending_readers:
            flat = flat.clone()
            self._shadows[storage._cdata] = Shadow(shadow.num_bytes, flat)
        return flat

    def is_uniform(self, tensor: torch.Tensor) -> bool:
        """Return whether all elements are known to be alike."""
        return tensor.untyped_storage()._cdata in self._uniform

    def set_uniform(self, tensor: torch.Tensor, value: Any) -> None:
        """Say that all elements of `tensor`, which owns its whole storage, are `value`, a number or a tensor of one."""
        if tensor.numel():
            address, dtype = tensor.untyped_storage()._cdata, tensor.dtype
            self.drop(address)
            is_tensor = isinstance(value, torch.Tensor)
            self._uniform[address] = value.to(dtype, copy=True) if is_tensor else torch.full((), value, dtype=dtype)

    def uniform_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of all elements, without dimensions; None if they differ or are not known."""
        if not tensor.is_meta:
            return tensor.reshape(()) if tensor.numel() == 1 else None
        known = self._uniform.get(tensor.untyped_storage()._cdata)
        if known is None and tensor.numel() == 1:
            known = self.get(tensor)
        return None if known is None or known.dtype != tensor.dtype else known.reshape(())

    def materialize(self, storage: torch.UntypedStorage) -> None:
        """Make of the one value for all elements a value for each; zeros take no memory until they are written."""
        value = self._uniform.pop(storage._cdata)
        flat = untouched(storage.nbytes() // value.element_size(), value.dtype)
        if value != 0:
            flat.fill_(value)
        self._hold(storage, Shadow(storage.nbytes(), flat))

    def density_of(self, tensor: torch.Tensor) -> float | None:
        """Return the part of a mask's elements that is true, from 0 to 1, where nothing else is known of it."""
        return self._densities.get(tensor.untyped_storage()._cdata)

    def set_density(self, tensor: torch.Tensor, density: float) -> None:
        """Say that this part of a mask's elements, from 0 to 1, is true, spread evenly."""
        self._densities[tensor.untyped_storage()._cdata] = density


class ChosenTokens:
    """The numbers that stand for chosen tokens in the tensors of a run, by the address of their storage."""

    def __init__(self) -> None:
        self._numbers: dict[int, range] = {}

    def drop(self, address: int) -> None:
        """Forget the storage at `address`, which died or holds something else."""
        self._numbers.pop(address, None)

    def among(self, value: Any) -> range:
        """Return the numbers in `value`, one tensor or several, that stand for chosen tokens; none for most."""
        if not self._numbers:
            return range(0)
        found = [self._numbers.get(t.untyped_storage()._cdata) for t in find_tensors(value) if t.is_meta]
        ranges = [numbers for numbers in found if numbers]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else range(0)

    def mark(self, tensor: torch.Tensor, numbers: range) -> None:
        """Say that `numbers` stand for chosen tokens in `tensor`."""
        if numbers:
            self._numbers[tensor.untyped_storage()._cdata] = numbers

    def hand_on(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Say that integers made of chosen tokens have such among them."""
        if not self._numbers:
            return
        given = args[1:] if func.overloadpacket in unknown_values.UNIFORM else args
        numbers = self.among([*given, *kwargs.values()])
        for tensor in made:
            if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
                self.mark(tensor, numbers)

    def compared(self, func: Any, args: Any, known: Any, result: Any) -> Any:
        """Return `result`, which `func` gave of `known` arguments, with a chosen token equal to none that is named."""
        if not self._numbers or func.overloadpacket not in _COMPARISONS:
            return result
        left, right = (self.among([arg]) for arg in args[:2])
        if bool(left) == bool(right):
            return result
        number, chosen = torch.as_tensor(known[0]), left or right
        unknown = (number >= chosen.start) & (number < chosen.stop)
        return result | unknown if func.overloadpacket is torch.ops.aten.ne else result & ~unknown
