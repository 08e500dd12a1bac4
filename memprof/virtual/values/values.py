"""Follows what each operator does to values: computed, of one value for all elements, assumed or no longer known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.calls import OVERWRITES
from memprof.virtual.values import uniform
from memprof.virtual.values.budget import is_integer, is_small
from memprof.virtual.values.evaluation import Evaluator
from memprof.virtual.values.policy import UnknownPolicy
from memprof.virtual.values.store import ValueStore
from memprof.virtual.values.triangles import TriangleCache
from memprof.virtual.values.unknowns import UNIFORM

_aten = torch.ops.aten


class Values:
    """Keeps the values of the tensors on the virtual GPU in step with its operators.

    Args:
        assume: told what the run rests on.
    """

    def __init__(self, assume: Callable[[str], None]) -> None:
        self.assume = assume
        self.store = ValueStore()
        self.evaluator = Evaluator(self.store, assume)
        self.policy = UnknownPolicy(self.store, assume)
        self._triangles = TriangleCache(self.store)

    def propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Give the new tensors `outputs` of `func` their values, if they can be known or assumed."""
        self._propagate(func, args, kwargs, outputs)
        self.store.tokens.hand_on(func, args, kwargs, outputs)

    def _propagate(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        store = self.store
        if func.overloadpacket in UNIFORM:
            uniform.fill(store, func, args, kwargs, outputs)
            return
        if outputs and args and not is_integer(outputs[-1]) and not store.may_have(args[0]):
            return  # most operators: floats of what is not known
        if uniform.follow(store, func, args, kwargs, outputs):
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
        """Follow what `func` changes in place in `target`, or forget what `target` holds."""
        if target.numel():  # else nothing changes
            self._write(func, args, kwargs, target)
            self.store.tokens.hand_on(func, args, kwargs, [target])

    def _write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        store, address, packet = self.store, target.untyped_storage()._cdata, func.overloadpacket
        whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        replaces = whole and packet in OVERWRITES
        others = [*args[1:], *kwargs.values()]
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not is_integer(target)
        of_density = store.density_of(target) is not None
        if not self.evaluator.are_known(others) or drawn or (of_density and not replaces):
            store.drop(address)
            return
        if whole and packet in (_aten.zero_, _aten.fill_) and store.shadow_of(target) is None:
            store.set_uniform(target, 0 if packet is _aten.zero_ else self.evaluator.known(others[0]))
            return
        one = store.uniform_value(target) if whole else None
        if one is not None and not is_small(target) and uniform.follow(store, func, args, kwargs, [target]):
            return
        moves = whole and packet is _aten.copy_ and others[0].is_meta and others[0].shape == target.shape
        # As a new tensor would be: what is moved to the host and back is rarely read.
        if moves and self.evaluator.defer(_aten._to_copy.default, (others[0],), {"dtype": target.dtype}, target):
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
