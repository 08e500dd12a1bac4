"""Assumptions about values that are not known.

Reads of them follow a fixed policy, stated in the run's assumptions:

* a floating-point number read is 1.0 (losses and norms are finite), an integer 1, a condition False;
* `isfinite` is true everywhere, `isnan` and `isinf` false;
* indices chosen from unknown scores (topk, argmax, sort, multinomial) are balanced: each is chosen equally often, and a
  chosen token is equal to none that the program names, so that none ends a text (unknown_values.py);
* an unknown mask keeps every element wherever it selects or is counted, and as an array it is true everywhere, which
  bounds the memory from above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.values import budget, unknown_values
from memprof.virtual.values.budget import is_cheap_to_compute, is_integer
from memprof.virtual.values.shadows import threads_for
from memprof.virtual.values.store import ValueStore

_aten = torch.ops.aten

TOO_MANY_INDICES = (
    "Indices of a selection beyond 1 GiB are counted, and not computed: which elements they name is not known."
)


class UnknownPolicy:
    """Says what a program reads, selects and chooses where a store does not know it; `assume` is told of it."""

    def __init__(self, store: ValueStore, assume: Callable[[str], None]) -> None:
        self._store = store
        self._assume = assume
        # Tokens that end or pad a text, as far as the program has said so.
        self.ends: set[int] = set()
        # Called when the program reads a value that is not known, with what it is told.
        self.on_unknown: Callable[[torch.Tensor, str], None] = lambda tensor, told: None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor to show the program for `tensor`: its value, or what the policy says."""
        known = self._store.get(tensor)
        if known is not None:
            return known
        self._assume(
            "Values that derive from floating-point data are not computed: a float read by the program is 1.0, "
            "an integer 1, a condition False, a mask true everywhere."
        )
        # An element of a mask is part of a selection; what an operator made alone is a condition.
        alone = not tensor.dim() and tensor.untyped_storage().nbytes() == tensor.element_size()
        condition = tensor.dtype is torch.bool and alone
        told = False if condition else True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
        self.on_unknown(tensor, f"{told} for an unknown {str(tensor.dtype).removeprefix('torch.')}")
        return torch.full(tensor.shape, told, dtype=tensor.dtype)

    def selected(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices of the elements that `mask` selects, int64 [number, dimensions] as `nonzero` gives them.

        A mask that is not known selects every element. Indices beyond `budget.MAX_TENSOR_BYTES` are not computed: what
        is returned then is a meta tensor, which says how many there are.
        """
        known = None if is_cheap_to_compute(mask) else self._store.uniform_value(mask)
        known = self._store.get(mask) if known is None else known
        density = self._store.density_of(mask)
        if known is not None:
            number = mask.numel() * bool(known) if not known.dim() else int(known.count_nonzero())
        elif density is not None:
            self._assume("Selections by masks too large to compute are spread evenly.")
            number = round(density * mask.numel())
        else:
            self._assume("A selection by a mask whose values are not known keeps every element.")
            number = mask.numel()
        if number * max(1, mask.dim()) * torch.int64.itemsize > budget.MAX_TENSOR_BYTES:
            self._assume(TOO_MANY_INDICES)
            return torch.empty(number, mask.dim(), dtype=torch.int64, device="meta")
        if known is not None:
            return known.expand(mask.shape).nonzero() if number else known.new_empty((0, mask.dim()), dtype=torch.int64)
        if density is not None:
            return unknown_values.spread(mask.shape, density)
        return torch.ones(mask.shape, dtype=torch.bool).nonzero()

    def assume_results(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Give the results of `func` that cannot be computed what stands for them, if they are integers or masks."""
        store, packet = self._store, func.overloadpacket
        if not outputs or not args or not isinstance(args[0], torch.Tensor):
            return
        if packet is _aten.all:
            store.set_uniform(outputs[-1], 1)
            return
        if not is_integer(outputs[-1]):
            return
        density = self._density(args[0])
        assumed = None
        if density is not None and (packet is _aten._to_copy or store.is_trackable(outputs[-1])):
            # A copy is of one value.
            with threads_for(outputs[-1].numel()):
                assumed = unknown_values.counted(func, args, outputs[-1], density)
        if assumed is not None:
            store.set(outputs[-1], assumed)
            return
        if density is not None and density < 1.0:
            if packet in unknown_values.KEEP_DENSITY:
                store.set_density(outputs[-1], density)
            return
        if store.get(args[0]) is None and store.is_trackable(outputs[-1]):
            with threads_for(outputs[-1].numel()):
                chosen = unknown_values.choices(func, args, kwargs, outputs, self.ends)
            if chosen is not None:
                self._assume(unknown_values.CHOICES)
                store.set(outputs[-1], chosen[0])
                store.tokens.mark(outputs[-1], chosen[1])

    def _density(self, tensor: torch.Tensor) -> float | None:
        """The part of a mask's elements that is true, where not more is known; None if this is no such mask."""
        density = self._store.density_of(tensor) if tensor.is_meta else None
        if density is not None:
            return density
        return 1.0 if tensor.dtype is torch.bool and self._store.get(tensor) is None else None

    def record_density(self, func: Any, args: Any, target: torch.Tensor) -> None:
        """Keep of a `target` too large to follow how much of it is ones (a routing mask, as one_hot makes it)."""
        one = self._store.uniform_value(target)
        self._store.drop(target.untyped_storage()._cdata)
        if func is _aten.scatter_.value and one is not None and one == 0 and args[3] == 1 and target.dim():
            self._store.set_density(target, args[2].numel() / target.numel())
