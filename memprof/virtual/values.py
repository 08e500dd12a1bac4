"""Values on the virtual GPU: which numbers are really computed, and what is assumed of those that are not.

Device tensors are meta tensors: they have shapes and no data. Eager code reads data all the same: "is this batch
packed?", "which tokens go to expert 3?", `loss.item()`. So small tensors of integers and booleans are really computed,
on the CPU beside their meta tensor (a *shadow*), as long as everything that they derive from is known; then the program
takes the branch that a real run takes. What derives from floating-point data is unknown, and reads of it follow a fixed
policy, stated in the run's assumptions:

* a floating-point number read is 1.0 (losses and norms are finite), an integer 1, a boolean False;
* `isfinite` is true everywhere, `isnan` and `isinf` false;
* indices chosen from unknown scores (topk, argmax, sort, multinomial) are balanced: each is chosen equally often;
* a selection by an unknown mask keeps every element, which bounds the memory from above.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.calls import OVERWRITES

_aten = torch.ops.aten

MAX_INTEGER_ELEMENTS = 1 << 24
"""Integer and boolean tensors up to this size are really computed (16 Mi elements: a 4,096 x 4,096 mask)."""
MAX_BYTE_ELEMENTS = 1 << 20
"""Integers of 8 bits up to this size: what is larger is images or quantized weights, whose values decide nothing."""
MAX_FLOAT_ELEMENTS = 1 << 12
"""Floating-point tensors up to this size keep their value while it is known (schedules, counters, scales)."""

_MAPPED_BYTES = 1 << 16
"""Shadows of zeros from this size on are pages that the system makes when they are written."""

_RANDOM = frozenset({"rand", "randn", "randint", "randperm", "bernoulli", "normal", "uniform"})


class Values:
    """The shadows of the tensors on the virtual GPU."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self._flat: dict[int, torch.Tensor] = {}
        self.assume = assume
        self._draws = 0
        self.on_unknown: Callable[[torch.Tensor, str], None] = lambda tensor, told: None
        """Called when the program reads a value that is not known, with what it is told."""

    def drop(self, address: int) -> None:
        """The storage at `address` died, or its contents are no longer known."""
        self._flat.pop(address, None)

    def knows(self, address: int) -> bool:
        """Whether the storage at `address` has a shadow."""
        return address in self._flat

    def flat(self, address: int) -> torch.Tensor | None:
        """What the whole storage at `address` holds, None if that is not known."""
        return self._flat.get(address)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor behind `tensor` (a real tensor is its own), None if its contents are not known."""
        if not tensor.is_meta:
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = self._flat.get(tensor.untyped_storage()._cdata)
        if flat is None:
            return None
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor`, which owns its whole storage, is known to hold `value` (same shape and dtype)."""
        if not tensor.numel():
            return
        flat = torch.empty(_num_elements(tensor), dtype=tensor.dtype)
        flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)
        self._flat[tensor.untyped_storage()._cdata] = flat

    def set_zeros(self, tensor: torch.Tensor) -> None:
        """`tensor`, which owns its whole storage, is known to hold zeros; those take no memory until they are written.

        The state of an 8-bit optimizer, which no operator here ever fills, would be gigabytes otherwise.
        """
        if tensor.numel():
            self._flat[tensor.untyped_storage()._cdata] = _untouched(_num_elements(tensor), tensor.dtype)

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this dtype and size is worth computing."""
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.numel() <= MAX_FLOAT_ELEMENTS
        if tensor.dtype in (torch.int8, torch.uint8):
            return tensor.numel() <= MAX_BYTE_ELEMENTS
        return tensor.numel() <= MAX_INTEGER_ELEMENTS

    # -- operators --------------------------------------------------------------------------------------------------

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func` really computed on the CPU, or None if an input is not known."""
        known_args = self._known(_shapes_only(args) if func.overloadpacket in _LIKE else args)
        known_kwargs = self._known({k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})
        if known_args is None or known_kwargs is None:
            return None
        if "device" in kwargs:
            known_kwargs["device"] = torch.device("cpu")
        try:
            if func.overloadpacket._qualified_op_name.removeprefix("aten::").rstrip("_") in _RANDOM:
                return self._draw(func, known_args, known_kwargs)
            return func(*known_args, **known_kwargs)
        except (RuntimeError, IndexError, NotImplementedError):
            # The CPU cannot do it, or the same call on the meta tensors is about to raise the user's own error.
            return None

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random integers, the same in every run and without touching the program's generator; floats are unknown."""
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._draws)
            self._draws += 1
            result = func(*args, **kwargs)
        return None if result.is_floating_point() else result

    def _known(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.get(value)
        if isinstance(value, (list, tuple)):
            parts = [self._known(part) for part in value]
            if any(part is None and original is not None for part, original in zip(parts, value, strict=True)):
                return None
            return parts
        if isinstance(value, dict):
            items = {key: self._known(part) for key, part in value.items()}
            if any(items[key] is None and part is not None for key, part in value.items()):
                return None
            return items
        return value

    def learn(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Give the new tensors `outputs` of `func` their values, if they can be known or assumed."""
        if not any(self.wants(output) for output in outputs):
            return
        if func.overloadpacket in _BLANK:
            for output in outputs:
                self.set_zeros(output)
            return
        result = self.compute(func, args, kwargs)
        if result is None:
            policy = _POLICIES.get(func.overloadpacket)
            if policy is not None:
                for output in outputs:
                    if not output.is_floating_point() and self.wants(output):
                        self.set(output, policy(output, args))
            return
        results = result if isinstance(result, (list, tuple)) else [result]
        for output, known in zip(outputs, results, strict=False):
            if isinstance(known, torch.Tensor) and known.shape == output.shape and self.wants(output):
                self.set(output, known)

    def write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        """`func` changes `target` in place: follow it, or forget what `target` holds."""
        address = target.untyped_storage()._cdata
        if address not in self._flat:
            whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
            overwrites = func.overloadpacket in OVERWRITES
            if not (whole and overwrites and self.wants(target)):
                return
            self.set_zeros(target)
        if self.compute(func, args, kwargs) is None:
            del self._flat[address]

    # -- reads ------------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor to show the program for `tensor`: its value, or what the policy says."""
        known = self.get(tensor)
        if known is not None:
            return known
        self.assume(
            "Values that derive from floating-point data are not computed: a float read by the program is 1.0, "
            "an integer 1, a boolean False."
        )
        told = False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
        self.on_unknown(tensor, f"{told} for an unknown {str(tensor.dtype).removeprefix('torch.')}")
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.dtype is torch.bool else _ones(tensor)

    def selected(self, mask: torch.Tensor) -> torch.Tensor:
        """The indices of the elements that `mask` selects, as `nonzero` gives them; all of them if not known."""
        known = self.get(mask)
        if known is None:
            self.assume("A selection by a mask whose values are not known keeps every element.")
            known = torch.ones(mask.shape, dtype=torch.bool)
        return known.nonzero()


def _num_elements(tensor: torch.Tensor) -> int:
    """Of the tensor's whole storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _untouched(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; many of them are pages that the system makes when they are written."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _MAPPED_BYTES:
        return torch.zeros(num_elements, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype)


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _shapes_only(args: Any) -> Any:
    return (torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype), *args[1:])


def _balanced(output: torch.Tensor, args: Any) -> torch.Tensor:
    """Indices into the last dimension of `args[0]`, so that each is chosen equally often over all rows."""
    choices = max(1, args[0].shape[-1] if args[0].dim() else 1)
    return (torch.arange(output.numel()) % choices).to(output.dtype).reshape(output.shape)


def _true(output: torch.Tensor, args: Any) -> torch.Tensor:
    return torch.ones(output.shape, dtype=output.dtype)


_POLICIES: dict[Any, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    _aten.topk: _balanced,
    _aten.argmax: _balanced,
    _aten.argmin: _balanced,
    _aten.max: _balanced,
    _aten.min: _balanced,
    _aten.sort: _balanced,
    _aten.argsort: _balanced,
    _aten.multinomial: _balanced,
    _aten.all: _true,
}
_LIKE = frozenset({_aten.zeros_like, _aten.ones_like, _aten.full_like})
"""These take the shape of a tensor and not what it holds: the gradient of a loss is 1, whatever the loss is."""
_BLANK = frozenset(
    {
        *(_aten.zeros, _aten.zeros_like, _aten.new_zeros),
        *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    }
)
"""These make zeros, or what may as well be zeros."""
