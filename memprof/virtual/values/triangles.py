"""The mask of causal attention, which every layer makes again."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.values import budget
from memprof.virtual.values.store import ValueStore

_aten = torch.ops.aten


class TriangleCache:
    """Keeps the last triangle of a matrix of one value: attention makes the same mask in every layer."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._last: tuple[Any, torch.Tensor] | None = None

    def key_of(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> Any:
        """Return what the triangle `output` is made of; None if it is none to be kept."""
        if func.overloadpacket not in (_aten.tril, _aten.triu):
            return None
        one = self._store.uniform_value(args[0])
        if one is None or kwargs or output.numel() * output.element_size() > budget.MAX_TRIANGLE_BYTES:
            return None
        return func, one.item(), output.dtype, output.size(), output.stride(), *args[1:]

    def elements(self, key: Any) -> torch.Tensor | None:
        """Return the elements of the triangle that was kept, if it is made of the same."""
        return self._last[1] if key is not None and self._last is not None and self._last[0] == key else None

    def keep(self, key: Any, output: torch.Tensor) -> None:
        """Keep what `output` holds for the next; whoever writes into either has a copy of its own."""
        shadow = self._store.shadow_of(output)
        flat = None if shadow is None else shadow.flat()
        if shadow is not None and flat is not None:
            shadow.has_pending_readers = True
            self._last = key, flat
