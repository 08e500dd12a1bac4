"""Policy for unknown values: fixed values, which the run's assumptions state:

* a float that the program reads is 1.0 (losses and norms are finite), an integer 1, a condition False;
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

TOO_MANY_INDICES_ASSUMPTION = (
    "Indices of a selection beyond 1 GiB are counted, and not computed: which elements they name is not known."
)


class UnknownValuePolicy:
    """Policy that sets the values of unknown tensors; `assume` is called with each assumption."""

    def __init__(self, store: ValueStore, assume: Callable[[str], None]) -> None:
        self._store = store
        self._assume = assume
        # Tokens that end or pad a text, as far as the program has named them.
        self.end_tokens: set[int] = set()
        # Called when the program reads an unknown tensor, with the tensor and a description of the assumed value.
        self.on_unknown_read: Callable[[torch.Tensor, str], None] = lambda tensor, description: None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor with the values of `tensor` if known, else filled with the assumed value."""
        values = self._store.get(tensor)
        if values is not None:
            return values
        self._assume(
            "Values that derive from floating-point data are not computed: a float read by the program is 1.0, "
            "an integer 1, a condition False, a mask true everywhere."
        )
        # An element of a mask is part of a selection; a boolean that owns its storage is a condition.
        is_scalar = not tensor.dim() and tensor.untyped_storage().nbytes() == tensor.element_size()
        is_flag = tensor.dtype is torch.bool and is_scalar
        value = False if is_flag else True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
        self.on_unknown_read(tensor, f"{value} for an unknown {str(tensor.dtype).removeprefix('torch.')}")
        return torch.full(tensor.shape, value, dtype=tensor.dtype)

    def find_selected_indices(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices of the elements that `mask` selects, as `nonzero`: int64 [num_indices, mask.dim()].

        An unknown mask selects every element. Indices of more than `budget.MAX_TENSOR_BYTES` are not computed: the
        result is then a meta tensor.
        """
        values = None if is_cheap_to_compute(mask) else self._store.get_uniform_value(mask)
        values = self._store.get(mask) if values is None else values
        density = self._store.get_density(mask)
        if values is not None:
            num_indices = mask.numel() * bool(values) if not values.dim() else int(values.count_nonzero())
        elif density is not None:
            self._assume("Selections by masks too large to compute are spread evenly.")
            num_indices = round(density * mask.numel())
        else:
            self._assume("A selection by a mask whose values are not known keeps every element.")
            num_indices = mask.numel()
        if num_indices * max(1, mask.dim()) * torch.int64.itemsize > budget.MAX_TENSOR_BYTES:
            self._assume(TOO_MANY_INDICES_ASSUMPTION)
            return torch.empty(num_indices, mask.dim(), dtype=torch.int64, device="meta")
        if values is not None:
            values = values.expand(mask.shape)
            return values.nonzero() if num_indices else values.new_empty((0, mask.dim()), dtype=torch.int64)
        if density is not None:
            return unknown_values.spread_indices(mask.shape, density)
        return torch.ones(mask.shape, dtype=torch.bool).nonzero()

    def assume_results(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Set the integer and boolean tensors in `outputs` of `func`, whose inputs are unknown, to assumed values."""
        store, packet = self._store, func.overloadpacket
        if not outputs or not args or not isinstance(args[0], torch.Tensor):
            return
        if packet is _aten.all:
            store.set_uniform(outputs[-1], 1)
            return
        if not is_integer(outputs[-1]):
            return
        density = self._find_density(args[0])
        counts = None
        if density is not None and (packet is _aten._to_copy or store.is_trackable(outputs[-1])):
            with limit_threads(outputs[-1].numel()):
                counts = unknown_values.count_mask(func, args, outputs[-1], density)
        if counts is not None:
            store.set(outputs[-1], counts)
            return
        if density is not None and density < 1.0:
            if packet in unknown_values.DENSITY_PRESERVING:
                store.set_density(outputs[-1], density)
            return
        if store.get(args[0]) is None and store.is_trackable(outputs[-1]):
            with limit_threads(outputs[-1].numel()):
                choices = unknown_values.spread_choices(func, args, kwargs, outputs, self.end_tokens)
            if choices is not None:
                self._assume(unknown_values.CHOICES_ASSUMPTION)
                store.set(outputs[-1], choices[0])
                store.tokens.mark_placeholders(outputs[-1], choices[1])

    def _find_density(self, tensor: torch.Tensor) -> float | None:
        """Return the fraction (0 to 1) of true elements to assume for a mask; None if each element is known."""
        density = self._store.get_density(tensor) if tensor.is_meta else None
        if density is not None:
            return density
        return 1.0 if tensor.dtype is torch.bool and self._store.get(tensor) is None else None

    def record_density(self, func: Any, args: Any, target: torch.Tensor) -> None:
        """Forget the values of `target`; record its fraction of ones if `func` scatters ones into zeros (one_hot)."""
        old_value = self._store.get_uniform_value(target)
        self._store.drop(target.untyped_storage()._cdata)
        if func is _aten.scatter_.value and old_value is not None and old_value == 0 and args[3] == 1 and target.dim():
            self._store.set_density(target, args[2].numel() / target.numel())
