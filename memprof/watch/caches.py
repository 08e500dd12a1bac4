"""Detection of a model's caches of earlier tokens (keys, values, states) by the operators that the model runs.

Each sign counts only within a submodule of a model that is called without gradients:

| kind of cache | sign in the operators |
|---|---|
| preallocated buffers, a pool of pages | the call writes a part of a storage that is older than the call |
| a state that is overwritten | two calls write the whole of an older storage |
| tensors that grow | a tensor of an earlier call is concatenated, and the result is live after the call |
| lists that the caller passes back | a container argument has a tensor that an earlier call returned |
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
WRITE_OPERATORS = frozenset({_aten.copy_, _aten.index_copy_, _aten.index_put_, _aten._index_put_impl_, _aten.scatter_})
_MAX_DEPTH = 4  # depth to which containers in a module's arguments and results are searched
_AllocationKey = tuple[int, int, int]


class KVCacheDetector:
    """Detector of KV caches in one run; marks their storages in the recorder's owner table."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Number of storages before each outermost module call; `_roots` has the module of each such call.
        self._call_starts: list[int] = []
        self._roots: list[int] = []
        self._runs_without_gradients = False
        # In the running call: index of the older part, and the number of storages before the concatenation.
        self._concatenations: list[tuple[int, int]] = []
        self._first_overwrites: dict[int, int] = {}  # storages, and the number of the first call that overwrote them
        self._last_results: defaultdict[int, set[int]] = defaultdict(set)  # results of each module's last call
        self._cache_allocation_keys: set[_AllocationKey] = (
            set()
        )  # operators, lines and modules that make cache storages

    def record_call(self, module: int, arguments: Any) -> None:
        """Record that module `module` is called from outside all other modules, with `arguments`."""
        self._runs_without_gradients = not torch.is_grad_enabled()
        self._concatenations.clear()  # the call before may have raised
        self._call_starts.append(len(self._recorder.trace.storages))
        self._roots.append(module)
        if self._runs_without_gradients:
            passed_back = self._find_numeric_storages([one for one in arguments if not isinstance(one, torch.Tensor)])
            for index in passed_back & self._last_results[module]:
                self._mark_as_cache(index)

    def record_call_result(self, result: Any) -> None:
        """Record that the outermost module call returned `result`."""
        if not self._runs_without_gradients:
            return
        self._runs_without_gradients = False
        trace = self._recorder.trace
        for old, before in self._concatenations:
            new = next(
                (i for i in range(before, len(trace.storages)) if trace.op(trace.storages[i]) == "aten.cat"), NONE
            )
            if self._recorder.storages.is_live(new):
                self._mark_as_cache(old)
                self._mark_as_cache(new)
        returned = self._find_numeric_storages([result])
        self._last_results[self._roots[-1]] = returned
        for index in returned:
            if _make_allocation_key(trace.storages[index]) in self._cache_allocation_keys:
                self._mark_as_cache(index)

    @property
    def is_watching(self) -> bool:
        """Return whether a submodule runs without gradients, so that operators may write a cache."""
        return self._runs_without_gradients and self._recorder.modules.current_index not in (NONE, self._roots[-1])

    def record_write(self, target: torch.Tensor) -> None:
        """Record that an operator of WRITE_OPERATORS writes into `target`."""
        index = self._recorder.storages.get_index(target)
        if not NONE < index < self._call_starts[-1] or not _is_numeric(target):
            return
        is_full_write = target.untyped_storage().nbytes() == target.numel() * target.itemsize
        if not is_full_write or self._first_overwrites.setdefault(index, len(self._call_starts)) < len(
            self._call_starts
        ):
            self._mark_as_cache(index)

    def record_concatenation(self, parts: list[torch.Tensor]) -> None:
        """Record that `parts` are about to be concatenated."""
        for part in parts:
            index = self._recorder.storages.get_index(part)
            if self.is_from_earlier_call(index) and _is_numeric(part):
                self._concatenations.append((index, len(self._recorder.trace.storages)))

    def is_from_earlier_call(self, index: int) -> bool:
        """Return whether an earlier call of the outermost module made the storage with this index."""
        if not self._call_starts or not NONE < index < self._call_starts[-1]:
            return False
        call_index = bisect.bisect_right(self._call_starts, index) - 1
        storage = self._recorder.trace.storages[index]
        return storage.module != NONE and call_index >= 0 and self._roots[call_index] == self._roots[-1]

    def _mark_as_cache(self, index: int) -> None:
        self._recorder.owners.mark_kv_cache(index)
        storage = self._recorder.trace.storages[index]
        if storage.module != NONE:
            self._cache_allocation_keys.add(_make_allocation_key(storage))

    def _find_numeric_storages(self, values: Any) -> set[int]:
        """Return the indices of the tensors with numbers in `values`, also those in containers."""
        with torch.DisableTorchFunction():
            found = {
                self._recorder.storages.get_index(tensor) for tensor in iterate_tensors(values) if _is_numeric(tensor)
            }
        return found - {NONE}


def iterate_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, the arguments or the result of a module, containers included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from iterate_tensors(part, depth + 1)


def _make_allocation_key(storage: Storage) -> _AllocationKey:
    return storage.op, storage.source, storage.module


def _is_numeric(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has floating-point or quantized numbers, as tokens, positions and masks do not."""
    return tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8)
