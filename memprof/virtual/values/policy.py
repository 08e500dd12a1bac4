"""Assumptions about values that are not known.

Reads of unknown values follow a fixed policy, stated in the run's assumptions:

* a floating-point number read is 1.0 (losses and norms are finite), an integer 1, a condition False;
* `isfinite` is true everywhere, `isnan` and `isinf` false;
* indices chosen from unknown scores (topk, argmax, sort, multinomial) are balanced: each index is chosen equally often,
  and a chosen token differs from every token that the program names, so that no text ends early (unknown_values.py);
* an unknown mask selects every element, counts every element, and as an array is true everywhere, which bounds the
  memory from above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.values import budget, unknown_values
from memprof.virtual.values.budget import is_cheap_to_compute, is_integer
from memprof.virtual.values.shadows import limit_threads
from memprof.virtual.values.store import ValueStore

_aten = torch.ops.aten

TOO_MANY_INDICES = (
    "Indices of a selection beyond 1 GiB are counted, and not computed: which elements they name is not known."
)


class UnknownPolicy:
    """Values that a program reads, selects and chooses where a store has none; `assume` receives each assumption."""

    def __init__(self, store: ValueStore, assume: Callable[[str], None]) -> None:
        self._store = store
        self._assume = assume
        # Tokens that end or pad a text, where the program has named them.
        self.end_tokens: set[int] = set()
        # Called with a tensor whose value is not known, when the program reads it, and a description of the answer.
        self.on_unknown: Callable[[torch.Tensor, str], None] = lambda tensor, shown: None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor for a program that reads `tensor`: the known value, or the value that the policy sets."""
        known = self._store.get(tensor)
        if known is not None:
            return known
        self._assume(
            "Values that derive from floating-point data are not computed: a float read by the program is 1.0, "
            "an integer 1, a condition False, a mask true everywhere."
        )
        # An element of a mask is part of a selection; a boolean that owns its storage is a condition.
        is_scalar = not tensor.dim() and tensor.untyped_storage().nbytes() == tensor.element_size()
        is_flag = tensor.dtype is torch.bool and is_scalar
        shown = False if is_flag else True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
        self.on_unknown(tensor, f"{shown} for an unknown {str(tensor.dtype).removeprefix('torch.')}")
        return torch.full(tensor.shape, shown, dtype=tensor.dtype)

    def selected(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices of the elements that `mask` selects, int64 [number, dimensions] as of `nonzero`.

        A mask that is not known selects every element. Indices of more than `budget.MAX_TENSOR_BYTES` are not computed:
        the result is a meta tensor then.
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
            return unknown_values.spread_indices(mask.shape, density)
        return torch.ones(mask.shape, dtype=torch.bool).nonzero()

    def assume_results(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Set the integer and mask `outputs` of `func`, which cannot be computed, to the values of the policy."""
        store, packet = self._store, func.overloadpacket
        if not outputs or not args or not isinstance(args[0], torch.Tensor):
            return
        if packet is _aten.all:
            store.set_uniform(outputs[-1], 1)
            return
        if not is_integer(outputs[-1]):
            return
        density = self._find_density(args[0])
        assumed = None
        if density is not None and (packet is _aten._to_copy or store.is_trackable(outputs[-1])):
            with limit_threads(outputs[-1].numel()):
                assumed = unknown_values.count_mask(func, args, outputs[-1], density)
        if assumed is not None:
            store.set(outputs[-1], assumed)
            return
        if density is not None and density < 1.0:
            if packet in unknown_values.KEEP_DENSITY:
                store.set_density(outputs[-1], density)
            return
        if store.get(args[0]) is None and store.is_trackable(outputs[-1]):
            with limit_threads(outputs[-1].numel()):
                chosen = unknown_values.spread_choices(func, args, kwargs, outputs, self.end_tokens)
            if chosen is not None:
                self._assume(unknown_values.CHOICES)
                store.set(outputs[-1], chosen[0])
                store.tokens.mark(outputs[-1], chosen[1])

    def _find_density(self, tensor: torch.Tensor) -> float | None:
        """Return the fraction (0 to 1) of the elements of a mask that is true, if only that is known or assumed."""
        density = self._store.density_of(tensor) if tensor.is_meta else None
        if density is not None:
            return density
        return 1.0 if tensor.dtype is torch.bool and self._store.get(tensor) is None else None

    def record_density(self, func: Any, args: Any, target: torch.Tensor) -> None:
        """Record only the fraction of ones of a `target` that is too large to compute (a routing mask of one_hot)."""
        one = self._store.uniform_value(target)
        self._store.drop(target.untyped_storage()._cdata)
        if func is _aten.scatter_.value and one is not None and one == 0 and args[3] == 1 and target.dim():
            self._store.set_density(target, args[2].numel() / target.numel())
