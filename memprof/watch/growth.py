"""Detection of memory that accumulates in a program that names no phases, and of the objects that keep that memory.

The trace alone shows what accumulates. The objects that keep the memory are visible only while the program runs,
because a list is gone when its function has returned. So live bytes are summed at the ends of the first few steps and
calls, then ever more rarely; only where a sum grew twice in a row are the program's objects searched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memprof.torch_private import autograd
from memprof.trace.events import HOST, NONE, ROLES_PER_STEP, Forward, PhaseKind, Storage
from memprof.watch.caches import iterate_tensors
from memprof.watch.holders import HolderSearch
from memprof.watch.recorder import Recorder

MIN_CALL_GROWTH_BYTES = (
    64 << 10
)  # growth over calls of a model is searched from this size on; a decoder's tokens are less

MAX_SEARCHES = 8  # In one run. Each looks through all objects of the process, some tens of milliseconds.

# Operator, line, module, dtype, number of dimensions, phase: equal for the counterparts of a tensor in other steps.
_CounterpartKey = tuple[int, int, int, str, int, PhaseKind]


class GrowthWatch:
    """Steps and outermost calls of a program, watched for memory that accumulates over them.

    Both steps and calls have their state here: hence the number of attributes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._search = HolderSearch(recorder)
        self._in_step = False  # whether an optimizer's step runs, or the closure in the step
        self._loop_first_storage = NONE  # the first storage of the first step
        self._last_begun_step = 0  # the last step that began; `_last_ended_step`: the last step that ended
        self._last_ended_step = 0
        self._step_samples = _GrowthSamples()
        self._call_samples: dict[int, _GrowthSamples] = {}  # of calls without a backward between them, by module
        self._calls_first_storage = 0
        self._output_storages: set[int] = set()
        self._running_call: tuple[int, int, int, bool, int | None] | None = None
        self._num_searches = 0
        self._has_found_sums = False  # whether running sums were found
        self._searched_keys: set[_CounterpartKey] = set()  # keys whose holders have been searched

    def record_phase_begin(self, kind: PhaseKind, *, in_step: bool) -> None:
        """Record that a phase begins; `in_step` is true for a phase in the closure of an optimizer's step."""
        was_in_step, self._in_step = self._in_step, in_step or kind is PhaseKind.OPTIMIZER_STEP
        if kind is PhaseKind.BACKWARD:
            self._record_step_begin()
            self._call_samples.clear()
            self._output_storages.clear()
        if was_in_step and not self._in_step:
            self._record_step_end()

    def record_call(self, module: nn.Module, index: int) -> None:
        """Record that a module is called from outside all other modules, not in a backward pass."""
        trace = self._recorder.trace
        self._record_step_begin()
        if self._loop_first_storage == NONE:
            self._loop_first_storage = len(trace.storages)
        if not self._call_samples:
            self._calls_first_storage = len(trace.storages)
        # torch.autograd.Function makes a node under no_grad, too, without inputs.
        number = autograd.get_sequence_nr() if torch.is_grad_enabled() else None
        self._running_call = (
            len(trace.events),
            index,
            self._recorder.attribution.find_caller_line(),
            module.training,
            number,
        )

    def record_call_result(self, result: Any) -> None:
        """Record that the outermost module call returned `result`."""
        if self._running_call is None:
            return
        (begin, module, source, training, number), self._running_call = self._running_call, None
        with torch.DisableTorchFunction():
            returned = list(iterate_tensors(result))
            outputs = {self._recorder.storages.get_index(tensor) for tensor in returned} - {NONE}
            has_graph = number is not None and (not returned or any(tensor.requires_grad for tensor in returned))
        trace = self._recorder.trace
        nodes = autograd.get_sequence_nr() - number if number is not None and has_graph else 0
        output_indices = tuple(sorted(outputs))
        trace.forwards.append(Forward(begin, len(trace.events), module, source, training, nodes, output_indices))
        self._output_storages |= outputs
        samples = self._call_samples.setdefault(module, _GrowthSamples())
        # In training, tensors left by calls may still be used by a backward pass.
        if not (nodes and training) and samples.is_due():
            grown = samples.find_grown_keys(
                self._sum_live_bytes(self._calls_first_storage, self._iterate_leftover_storages(nodes)),
                MIN_CALL_GROWTH_BYTES,
            )
            self._search_holders(grown, self._calls_first_storage)

    def record_run_end(self) -> None:
        """Record the end of the program, with its variables still live."""
        if self._loop_first_storage != NONE and self._step_samples.num_rounds >= 2:
            self._search_holders(
                self._step_samples.find_grown_keys(self._sum_live_bytes(self._loop_first_storage)),
                self._loop_first_storage,
            )

    def _record_step_begin(self) -> None:
        step = self._recorder.writer.phase.step
        if step > self._last_begun_step:
            self._last_begun_step = step
            self._search.record_step_begin()

    def _record_step_end(self) -> None:
        # A step may have several optimizers: one look a step.
        self._search.record_step_end()
        step = self._recorder.writer.phase.step
        if self._loop_first_storage == NONE or step == self._last_ended_step:
            return
        self._last_ended_step = step
        if self._step_samples.is_due():
            self._search_holders(
                self._step_samples.find_grown_keys(self._sum_live_bytes(self._loop_first_storage)),
                self._loop_first_storage,
            )
            if not self._has_found_sums and self._step_samples.num_rounds in (2, _GrowthSamples.NUM_FIRST_ROUNDS):
                sums = self._search.find_running_sums()
                self._has_found_sums = bool(sums)
                self._recorder.trace.holders += sums

    def _iterate_leftover_storages(self, nodes: int) -> Iterator[int]:
        """Yield the storages that may accumulate between calls: outputs, and tensors that the program makes from
        outputs. Storages that modules keep (a KV cache) are excluded for calls without an autograd graph."""
        storages = self._recorder.trace.storages
        for index in self._recorder.storages.index_by_address.values():
            if nodes or storages[index].module == NONE or index in self._output_storages:
                yield index

    def _make_counterpart_key(self, storage: Storage) -> _CounterpartKey:
        """Return the key that a storage shares with its counterparts in other steps; gradients have their own phase."""
        kind = self._recorder.trace.phases[storage.phase].kind
        return storage.op, storage.source, storage.module, storage.dtype, len(storage.shape), kind

    def _find_candidates(self, first_index: int, indices: Iterable[int]) -> Iterator[tuple[int, _CounterpartKey]]:
        """Yield (index, key) of GPU storages made from `first_index` on, without a role or with a role of
        ROLES_PER_STEP."""
        trace = self._recorder.trace
        for index in indices:
            owner = trace.owners.get(index)
            if (
                index >= first_index
                and (owner is None or owner.role in ROLES_PER_STEP)
                and trace.storages[index].device != HOST
            ):
                yield index, self._make_counterpart_key(trace.storages[index])

    def _sum_live_bytes(self, first_index: int, indices: Iterable[int] | None = None) -> dict[_CounterpartKey, int]:
        """Return the bytes per key of the storages that were made from `first_index` on and may accumulate."""
        live_bytes: dict[_CounterpartKey, int] = defaultdict(int)
        for index, key in self._find_candidates(
            first_index, self._recorder.storages.index_by_address.values() if indices is None else indices
        ):
            live_bytes[key] += self._recorder.trace.storages[index].num_bytes
        return live_bytes

    def _search_holders(self, grown_keys: set[_CounterpartKey], first_index: int) -> None:
        grown_keys -= self._searched_keys
        if not grown_keys or self._num_searches == MAX_SEARCHES:
            return
        self._num_searches += 1
        self._searched_keys |= grown_keys
        live = self._recorder.storages.index_by_address.values()
        targets = {index: key for index, key in self._find_candidates(first_index, live) if key in grown_keys}
        self._recorder.trace.holders += self._search.find_holders(targets)


class _GrowthSamples:
    """Sums of live bytes at the ends of the first rounds, and ever more rarely after these."""

    NUM_FIRST_ROUNDS = 3

    def __init__(self) -> None:
        self.num_rounds = 0  # rounds so far
        self._sums: list[dict[_CounterpartKey, int]] = []

    def is_due(self) -> bool:
        """Count another round; return whether this round's sums are due."""
        self.num_rounds += 1
        return self.num_rounds <= self.NUM_FIRST_ROUNDS or self.num_rounds & (self.num_rounds - 1) == 0

    def find_grown_keys(
        self, live_bytes: dict[_CounterpartKey, int], min_growth_bytes: int = 1
    ) -> set[_CounterpartKey]:
        """Return the keys whose sums grew in both of the last two samples; empty if no sum grew by
        `min_growth_bytes`."""
        self._sums = [*self._sums[-2:], live_bytes]
        if len(self._sums) < 3:
            return set()
        first, second, third = self._sums
        rises = {key: min(third[key] - second.get(key, 0), second.get(key, 0) - first.get(key, 0)) for key in third}
        grown = {key: rise for key, rise in rises.items() if rise > 0}
        return set(grown) if any(rise >= min_growth_bytes for rise in grown.values()) else set()
