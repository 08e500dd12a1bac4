"""Propagation of values through operators: results are computed, set to one value, assumed, or become unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.operator_call import OVERWRITES, find_tensors
from memprof.virtual.values import budget, unknown_values
from memprof.virtual.values.budget import is_cheap_to_compute, is_integer
from memprof.virtual.values.evaluation import Evaluator
from memprof.virtual.values.policy import UnknownValuePolicy
from memprof.virtual.values.store import ValueStore

_aten = torch.ops.aten


class Values:
    """Values of virtual tensors, updated by each operator; `assume` is called with each assumption."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self.assume = assume
        self.store = ValueStore()
        self.evaluator = Evaluator(self.store, assume)
        self.policy = UnknownValuePolicy(self.store, assume)
        self._triangles = _TriangleCache(self.store)
        self.inner_products_are_one = False  # whether an unknown `dot` is 1 (integrations/lbfgs.py)

    def propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Record the values of `outputs`, new tensors that `func` returned, if they can be computed or assumed."""
        self._propagate(func, args, kwargs, outputs)
        self.store.tokens.propagate(func, args, kwargs, outputs)

    def _propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        store = self.store
        if func.overloadpacket in unknown_values.UNIFORM_FILLS:
            _record_fill(store, func, args, kwargs, outputs)
            return
        if self.inner_products_are_one and func.overloadpacket is _aten.dot:
            store.set_uniform(outputs[0], 1)
            return
        if outputs and args and not is_integer(outputs[-1]) and not store.can_read(args[0]):
            return  # most operators: floats that derive from unknown values
        if _propagate_uniform(store, func, args, kwargs, outputs):
            return
        result = None
        if self.evaluator.are_known((args, kwargs)) and any(store.is_trackable(output) for output in outputs):
            if len(outputs) == 1 and self.evaluator.defer(func, args, kwargs, outputs[0]):
                return
            triangle = self._triangles.make_key(func, args, kwargs, outputs[0])
            elements = self._triangles.get(triangle)
            if elements is not None:
                if self.evaluator.is_within_budget(func, [args[0], outputs[0]]):
                    store.set_elements(outputs[0].untyped_storage(), elements).has_pending_readers = True
                    return
            else:
                result = self.evaluator.compute(func, args, kwargs, outputs)
                if triangle is not None and result is not None:
                    store.set(outputs[0], result)
                    self._triangles.set(triangle, outputs[0])
                    return
        if result is None:
            self.policy.assume_results(func, args, kwargs, outputs)
            return
        results = result if isinstance(result, (list, tuple)) else [result]
        for output, values in zip(outputs, results, strict=False):
            if isinstance(values, torch.Tensor) and values.shape == output.shape and store.is_trackable(output):
                store.set(output, values)

    def write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        """Update the values of `target`, which `func` changes in place; forget them if the new values are unknown."""
        if target.numel():
            self._write(func, args, kwargs, target)
            self.store.tokens.propagate(func, args, kwargs, [target])

    def _write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        store, address, packet = self.store, target.untyped_storage()._cdata, func.overloadpacket
        covers_storage = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        is_overwritten = covers_storage and packet in OVERWRITES
        inputs = [*args[1:], *kwargs.values()]
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not is_integer(target)
        has_density = store.get_density(target) is not None
        if not self.evaluator.are_known(inputs) or is_random or (has_density and not is_overwritten):
            store.drop(address)
            return
        if covers_storage and packet in (_aten.zero_, _aten.fill_) and store.get_shadow(target) is None:
            store.set_uniform(target, 0 if packet is _aten.zero_ else self.evaluator.find_known_values(inputs[0]))
            return
        value = store.get_uniform_value(target) if covers_storage else None
        if (
            value is not None
            and not is_cheap_to_compute(target)
            and _propagate_uniform(store, func, args, kwargs, [target])
        ):
            return
        is_transfer = covers_storage and packet is _aten.copy_ and inputs[0].is_meta and inputs[0].shape == target.shape
        # A tensor copied to the host and back is rarely read.
        if is_transfer and self.evaluator.defer(_aten._to_copy.default, (inputs[0],), {"dtype": target.dtype}, target):
            return
        if store.get_shadow(target) is None:
            if not store.is_uniform(target) and not is_overwritten:
                return
            if not store.is_trackable(target):
                self.policy.record_density(func, args, target)
                return
            if not store.is_uniform(target):
                store.set_uniform(target, 0)
            store.materialize(target.untyped_storage())
        store.make_writable(target.untyped_storage())
        if self.evaluator.compute(func, args, kwargs) is None:
            self.policy.record_density(func, args, target)


def _record_fill(store: ValueStore, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    """Record the value to which `func`, one of `unknown_values.UNIFORM_FILLS`, sets all elements of `outputs`."""
    packet = func.overloadpacket
    value = unknown_values.UNIFORM_FILLS[packet](args, kwargs)
    value = store.get(value) if isinstance(value, torch.Tensor) else value
    for output in outputs:
        if value is not None and (
            packet not in unknown_values.UNINITIALIZED or is_cheap_to_compute(output) or is_integer(output)
        ):
            store.set_uniform(output, value)


def _propagate_uniform(store: ValueStore, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
    """Record the value of all elements of the output of `func`, if each input also has equal elements; return whether
    it was recorded."""
    packet = func.overloadpacket
    if len(outputs) != 1 or not args or not isinstance(args[0], torch.Tensor) or is_cheap_to_compute(args[0]):
        return False
    value = store.get_uniform_value(args[0])
    if value is None:
        return False
    if packet is _aten.sum or packet is _aten.count_nonzero:
        if value.is_floating_point():
            return False
        num_summands = args[0].numel() // outputs[0].numel()
        store.set_uniform(outputs[0], (value != 0 if packet is _aten.count_nonzero else value) * num_summands)
        return True
    if packet is _aten._to_copy or packet in unknown_values.UNIFORM_PRESERVING:
        store.set_uniform(outputs[0], value != 0 if packet is _aten.any or packet is _aten.all else value)
        return True
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:  # such as rrelu
        return False
    uniform_args = [store.get_uniform_value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if any(uniform is None and arg is not None for uniform, arg in zip(uniform_args, args, strict=True)):
        return False
    if find_tensors(list(kwargs.values())):
        return False
    try:
        store.set_uniform(outputs[0], func(*uniform_args, **{k: v for k, v in kwargs.items() if k != "memory_format"}))
    except (RuntimeError, IndexError, NotImplementedError):
        return False
    return True


class _TriangleCache:
    """Cache of the last triangular mask with equal elements: attention creates the same mask in every layer."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._entry: tuple[Any, torch.Tensor] | None = None

    def make_key(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> Any:
        """Return the cache key of `output` of `func`; None if it is not a triangular mask that is cached."""
        if func.overloadpacket not in (_aten.tril, _aten.triu):
            return None
        uniform = self._store.get_uniform_value(args[0])
        if uniform is None or kwargs or output.numel() * output.element_size() > budget.MAX_TRIANGLE_BYTES:
            return None
        return func, uniform.item(), output.dtype, output.size(), output.stride(), *args[1:]

    def get(self, key: Any) -> torch.Tensor | None:
        """Return the elements of the cached mask, [num_elements], if its key is `key`; else None."""
        return self._entry[1] if key is not None and self._entry is not None and self._entry[0] == key else None

    def set(self, key: Any, output: torch.Tensor) -> None:
        """Cache the elements of `output` under `key`; writes to `output` do not change the cached elements."""
        shadow = self._store.get_shadow(output)
        flat = None if shadow is None else shadow.read()
        if shadow is not None and flat is not None:
            shadow.has_pending_readers = True
            self._entry = key, flat
