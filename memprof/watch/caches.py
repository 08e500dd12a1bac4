"""Caches of earlier tokens that a model keeps (keys, values, states), told by what its code does, not by a name.

All of these hold within a part of a model that is called without gradients:

| the engine's way | what is seen |
|---|---|
| buffers that are filled by and by, a pool of pages | memory older than the call is written in part |
| a state that is overwritten | ... or wholly, in two calls |
| tensors that grow | what an earlier call made is joined to new, and the result is still there after the call |
| lists that are released | what an earlier call returned is given again, in a container |
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from memprof.trace.events import NONE, Storage
from memprof.watch.recorder import Recorder

_aten = torch.ops.aten
# Operators that write a part of their first argument.
WRITES = frozenset({_aten.copy_, _aten.index_copy_, _aten.index_put_, _aten._index_put_impl_, _aten.scatter_})
_MAX_DEPTH = 4  # of the containers in what a module is given and returns
_Key = tuple[int, int, int]


class KVCacheDetector:
    """Looks at one run, and tells its recorder what is kept for later tokens."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Storages made before each call of a module from outside all others, and in `_roots` which module it is.
        self._begins: list[int] = []
        self._roots: list[int] = []
        self._infers = False
        # In the call that is running: the older part, and the storages made before the join.
        self._joined: list[tuple[int, int]] = []
        self._overwritten: dict[int, int] = {}  # storages, and the number of the first call that overwrote them
        self._returned: defaultdict[int, set[int]] = defaultdict(set)  # what the last call of each module returned
        self._lines: set[_Key] = set()  # operators, lines and modules that make what is kept

    def call_begins(self, module: int, given: Any) -> None:
        """See a module called from outside all others, with these arguments."""
        self._infers = not torch.is_grad_enabled()
        self._joined.clear()  # the call before may have raised
        self._begins.append(len(self._recorder.trace.storages))
        self._roots.append(module)
        if self._infers:
            again = self._indices([one for one in given if not isinstance(one, torch.Tensor)])
            for index in again & self._returned[module]:
                self._keep(index)

    def call_returned(self, result: Any) -> None:
        """See that call return `result`."""
        if not self._infers:
            return
        self._infers = False
        trace = self._recorder.trace
        for old, before in self._joined:
            new = next(
                (i for i in range(before, len(trace.storages)) if trace.op(trace.storages[i]) == "aten.cat"), NONE
            )
            if self._recorder.storages.is_alive(new):
                self._keep(old)
                self._keep(new)
        returned = self._indices([result])
        self._returned[self._roots[-1]] = returned
        for index in returned:
            if _line(trace.storages[index]) in self._lines:
                self._keep(index)

    @property
    def looks(self) -> bool:
        """Return whether what the program does now may be to a cache: it is in a part of a model that infers."""
        return self._infers and self._recorder.modules.current not in (NONE, self._roots[-1])

    def written(self, target: torch.Tensor) -> None:
        """See an operator of WRITES write into `target`."""
        index = self._recorder.storages.index_of(target)
        if not NONE < index < self._begins[-1] or not _holds_numbers(target):
            return
        whole = target.untyped_storage().nbytes() == target.numel() * target.itemsize
        if not whole or self._overwritten.setdefault(index, len(self._begins)) < len(self._begins):
            self._keep(index)

    def joins(self, parts: list[torch.Tensor]) -> None:
        """See `parts` about to be joined to one tensor."""
        for part in parts:
            index = self._recorder.storages.index_of(part)
            if self.is_older(index) and _holds_numbers(part):
                self._joined.append((index, len(self._recorder.trace.storages)))

    def is_older(self, index: int) -> bool:
        """Return whether a storage was made by an earlier call of the module that is called."""
        if not self._begins or not NONE < index < self._begins[-1]:
            return False
        maker = bisect.bisect_right(self._begins, index) - 1
        made = self._recorder.trace.storages[index]
        return made.module != NONE and maker >= 0 and self._roots[maker] == self._roots[-1]

    def _keep(self, index: int) -> None:
        self._recorder.owners.mark_kv_cache(index)
        storage = self._recorder.trace.storages[index]
        if storage.module != NONE:
            self._lines.add(_line(storage))

    def _indices(self, values: Any) -> set[int]:
        """Return indices of the tensors with numbers in `values`, containers looked into."""
        with torch.DisableTorchFunction():
            found = {
                self._recorder.storages.index_of(tensor) for tensor in tensors_in(values) if _holds_numbers(tensor)
            }
        return found - {NONE}


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a module is given or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part, depth + 1)


def _line(storage: Storage) -> _Key:
    return storage.op, storage.source, storage.module


def _holds_numbers(tensor: torch.Tensor) -> bool:
    """Return whether it has numbers of any precision, quantized ones too, and no tokens, positions or masks."""
    return tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8)
