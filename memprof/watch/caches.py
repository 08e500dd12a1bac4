"""Detection of KV caches (keys, values and states of earlier tokens) from the operators that a model runs.

An operator counts only if it runs in a submodule of a model that is called without gradients:

| kind of cache | how it is recognized |
|---|---|
| preallocated buffers, a pool of pages | the call writes part of a storage that is older than the call |
| a state that is overwritten | two calls overwrite all of an older storage |
| tensors that grow | a tensor of an earlier call is concatenated, and the result is live after the call |
| lists that the caller passes back | a container among the arguments has a tensor that the last call returned |
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
_MAX_DEPTH = 4  # maximum nesting of the containers in arguments and results that are searched
_AllocationKey = tuple[int, int, int]


class KVCacheDetector:
    """Detector of KV caches in one run; marks their storages in the recorder's owner table."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # For each outermost module call: the number of storages in the trace before it, and (`_roots`) the module.
        self._call_first_storages: list[int] = []
        self._roots: list[int] = []
        self._runs_without_gradients = False
        # In the running call: index of the older part, and the number of storages before the concatenation.
        self._concatenations: list[tuple[int, int]] = []
        self._first_overwrites: dict[int, int] = {}  # storage -> ordinal of the first call that overwrote all of it
        self._last_results: defaultdict[int, set[int]] = defaultdict(set)  # module -> results of its last call
        self._cache_allocation_keys: set[_AllocationKey] = set()  # (operator, source line, module) of cache storages

    def record_call(self, module: int, arguments: Any) -> None:
        """Record an outermost call of the module with index `module`, with `arguments`."""
        self._runs_without_gradients = not torch.is_grad_enabled()
        self._concatenations.clear()  # the call before may have raised
        self._call_first_storages.append(len(self._recorder.trace.storages))
        self._roots.append(module)
        if self._runs_without_gradients:
            passed_back = self._find_numeric_storages([a for a in arguments if not isinstance(a, torch.Tensor)])
            for index in passed_back & self._last_results[module]:
                self._mark_as_cache(index)

    def record_call_result(self, result: Any) -> None:
        """Record that the outermost module call has returned `result`."""
        if not self._runs_without_gradients:
            return
        self._runs_without_gradients = False
        trace = self._recorder.trace
        for old, first in self._concatenations:
            new = next(
                (i for i in range(first, len(trace.storages)) if trace.op(trace.storages[i]) == "aten.cat"), NONE
            )
            if self._recorder.storages.is_live(new):
                self._mark_as_cache(old)
                self._mark_as_cache(new)
        returned = self._find_numeric_storages([result])
        self._last_results[self._roots[-1]] = returned
        for i in returned:
            if _make_allocation_key(trace.storages[i]) in self._cache_allocation_keys:
                self._mark_as_cache(i)

    @property
    def is_watching(self) -> bool:
        """Return whether a submodule is running in a call without gradients, so that operators may write a cache."""
        return self._runs_without_gradients and self._recorder.modules.current_index not in (NONE, self._roots[-1])

    def record_write(self, target: torch.Tensor) -> None:
        """Record that an operator of WRITE_OPERATORS writes into `target`."""
        index = self._recorder.storages.get_index(target)
        if not NONE < index < self._call_first_storages[-1] or not _is_numeric(target):
            return
        is_full_write = target.untyped_storage().nbytes() == target.numel() * target.itemsize
        if not is_full_write or self._first_overwrites.setdefault(index, len(self._call_first_storages)) < len(
            self._call_first_storages
        ):
            self._mark_as_cache(index)

    def record_concatenation(self, parts: list[torch.Tensor]) -> None:
        """Record that the tensors `parts` are about to be concatenated."""
        for part in parts:
            index = self._recorder.storages.get_index(part)
            if self.is_from_earlier_call(index) and _is_numeric(part):
                self._concatenations.append((index, len(self._recorder.trace.storages)))

    def is_from_earlier_call(self, index: int) -> bool:
        """Return whether storage `index` was allocated in an earlier call of the running outermost module."""
        if not self._call_first_storages or not NONE < index < self._call_first_storages[-1]:
            return False
        call_index = bisect.bisect_right(self._call_first_storages, index) - 1
        storage = self._recorder.trace.storages[index]
        return storage.module != NONE and call_index >= 0 and self._roots[call_index] == self._roots[-1]

    def _mark_as_cache(self, index: int) -> None:
        self._recorder.owners.mark_kv_cache(index)
        storage = self._recorder.trace.storages[index]
        if storage.module != NONE:
            self._cache_allocation_keys.add(_make_allocation_key(storage))

    def _find_numeric_storages(self, values: Any) -> set[int]:
        """Return the storages of the floating-point and quantized tensors in `values`, nested containers included."""
        with torch.DisableTorchFunction():
            found = {
                self._recorder.storages.get_index(tensor) for tensor in iterate_tensors(values) if _is_numeric(tensor)
            }
        return found - {NONE}


def iterate_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, nested tuples, lists and dicts included; `depth` is the nesting so far."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from iterate_tensors(part, depth + 1)


def _make_allocation_key(storage: Storage) -> _AllocationKey:
    return storage.op, storage.source, storage.module


def _is_numeric(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is floating-point or quantized, as caches are, unlike tokens, positions and masks."""
    return tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8)
