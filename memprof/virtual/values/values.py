"""Propagation of known values through operators: computed, equal for all elements, assumed, or no longer known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.operator_call import OVERWRITES, find_tensors
from memprof.virtual.values import budget, unknown_values
from memprof.virtual.values.budget import is_cheap_to_compute, is_integer
from memprof.virtual.values.evaluation import Evaluator
from memprof.virtual.values.policy import UnknownPolicy
from memprof.virtual.values.store import ValueStore

_aten = torch.ops.aten


class Values:
    """Values of tensors on the virtual GPU, updated by each operator; `assume` receives the run's assumptions."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self.assume = assume
        self.store = ValueStore()
        self.evaluator = Evaluator(self.store, assume)
        self.policy = UnknownPolicy(self.store, assume)
        self._triangles = _TriangleCache(self.store)

    def propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Record the values of `outputs`, the new tensors of `func`, if they can be computed or assumed."""
        self._propagate(func, args, kwargs, outputs)
        self.store.tokens.propagate(func, args, kwargs, outputs)

    def _propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        store = self.store
        if func.overloadpacket in unknown_values.UNIFORM:
            _record_fill(store, func, args, kwargs, outputs)
            return
        if outputs and args and not is_integer(outputs[-1]) and not store.may_have(args[0]):
            return  # most operators: floats that derive from unknown values
        if _map_uniform(store, func, args, kwargs, outputs):
            return
        result = None
        if self.evaluator.are_known((args, kwargs)) and any(store.is_trackable(output) for output in outputs):
            if len(outputs) == 1 and self.evaluator.defer(func, args, kwargs, outputs[0]):
                return
            triangle = self._triangles.key_of(func, args, kwargs, outputs[0])
            elements = self._triangles.elements(triangle)
            if elements is not None:
                if self.evaluator.is_within_budget(func, [args[0], outputs[0]]):
                    store.keep(outputs[0].untyped_storage(), elements).has_pending_readers = True
                    return
            else:
                result = self.evaluator.compute(func, args, kwargs, outputs)
                if triangle is not None and result is not None:
                    store.set(outputs[0], result)
                    self._triangles.keep(triangle, outputs[0])
                    return
        if result is None:
            self.policy.assume_results(func, args, kwargs, outputs)
            return
        results = result if isinstance(result, (list, tuple)) else [result]
        for output, known in zip(outputs, results, strict=False):
            if isinstance(known, torch.Tensor) and known.shape == output.shape and store.is_trackable(output):
                store.set(output, known)

    def write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        """Update the values of `target`, which `func` changes in place, or forget them."""
        if target.numel():
            self._write(func, args, kwargs, target)
            self.store.tokens.propagate(func, args, kwargs, [target])

    def _write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        store, address, packet = self.store, target.untyped_storage()._cdata, func.overloadpacket
        is_whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        replaces = is_whole and packet in OVERWRITES
        others = [*args[1:], *kwargs.values()]
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not is_integer(target)
        has_density = store.density_of(target) is not None
        if not self.evaluator.are_known(others) or is_random or (has_density and not replaces):
            store.drop(address)
            return
        if is_whole and packet in (_aten.zero_, _aten.fill_) and store.shadow_of(target) is None:
            store.set_uniform(target, 0 if packet is _aten.zero_ else self.evaluator.known(others[0]))
            return
        value = store.uniform_value(target) if is_whole else None
        if value is not None and not is_cheap_to_compute(target) and _map_uniform(store, func, args, kwargs, [target]):
            return
        is_transfer = is_whole and packet is _aten.copy_ and others[0].is_meta and others[0].shape == target.shape
        # Deferred as for a new tensor: a tensor moved to the host and back is rarely read.
        if is_transfer and self.evaluator.defer(_aten._to_copy.default, (others[0],), {"dtype": target.dtype}, target):
            return
        if store.shadow_of(target) is None:
            if not store.is_uniform(target) and not replaces:
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
    """Record the one value of the elements of `outputs` of `func`, an operator of `unknown_values.UNIFORM`."""
    packet = func.overloadpacket
    value = unknown_values.UNIFORM[packet](args, kwargs)
    value = store.get(value) if isinstance(value, torch.Tensor) else value
    for output in outputs:
        if value is not None and (
            packet not in unknown_values.EMPTY or is_cheap_to_compute(output) or is_integer(output)
        ):
            store.set_uniform(output, value)


def _map_uniform(store: ValueStore, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
    """Record the one value of the output of `func`, where the elements of each input are equal; return whether they
    are and `func` keeps them so."""
    packet = func.overloadpacket
    if len(outputs) != 1 or not args or not isinstance(args[0], torch.Tensor) or is_cheap_to_compute(args[0]):
        return False
    first = store.uniform_value(args[0])
    if first is None:
        return False
    if packet is _aten.sum or packet is _aten.count_nonzero:
        if first.is_floating_point() or not outputs[0].numel():
            return False
        repeats = args[0].numel() // outputs[0].numel()
        store.set_uniform(outputs[0], (first != 0 if packet is _aten.count_nonzero else first) * repeats)
        return True
    if packet is _aten._to_copy or packet in unknown_values.ANY_ELEMENT:
        store.set_uniform(outputs[0], first)
        return True
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    uniform_args = [store.uniform_value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if any(uniform is None and arg is not None for uniform, arg in zip(uniform_args, args, strict=True)):
        return False
    if find_tensors(list(kwargs.values())) or any(isinstance(arg, (list, tuple)) for arg in args):
        return False
    try:
        store.set_uniform(outputs[0], func(*uniform_args, **{k: v for k, v in kwargs.items() if k != "memory_format"}))
    except (RuntimeError, IndexError, NotImplementedError):
        return False
    return True


class _TriangleCache:
    """Cache of the last triangle of a matrix of equal elements: attention makes the same mask in every layer."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._last: tuple[Any, torch.Tensor] | None = None

    def key_of(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> Any:
        """Return the cache key of the triangle `output`; None if `func` makes no triangle that is cached."""
        if func.overloadpacket not in (_aten.tril, _aten.triu):
            return None
        uniform = self._store.uniform_value(args[0])
        if uniform is None or kwargs or output.numel() * output.element_size() > budget.MAX_TRIANGLE_BYTES:
            return None
        return func, uniform.item(), output.dtype, output.size(), output.stride(), *args[1:]

    def elements(self, key: Any) -> torch.Tensor | None:
        """Return the elements of the cached triangle, [elements], if its key is `key`."""
        return self._last[1] if key is not None and self._last is not None and self._last[0] == key else None

    def keep(self, key: Any, output: torch.Tensor) -> None:
        """Cache the elements of `output` under `key`; a later write to `output` copies them first."""
        shadow = self._store.shadow_of(output)
        flat = None if shadow is None else shadow.flat()
        if shadow is not None and flat is not None:
            shadow.has_pending_readers = True
            self._last = key, flat
