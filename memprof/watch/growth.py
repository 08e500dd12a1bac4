"""Detection, during the run, of memory that accumulates over steps or calls, and of the objects that keep it alive.

The trace shows later what accumulates. But the objects that keep the memory alive exist only while the program runs: a
list is gone when its function has returned. So live bytes are summed at the ends of the first few steps and calls, then
less and less often. If a sum grew twice in a row, all Python objects are searched for the holders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memprof.torch_private import autograd
from memprof.trace.events import HOST, NONE, ROLES_PER_STEP, Forward, Holder, PhaseKind, Role, Storage
from memprof.watch.caches import iterate_tensors
from memprof.watch.holders import HolderSearch
from memprof.watch.recorder import Recorder

MIN_CALL_GROWTH_BYTES = 64 << 10  # minimum growth over calls of a model for a search; the tokens of a decoder take less

MIN_CALLS = 3  # whose graphs wait for one backward; fewer may be the parts of a loss

MAX_SEARCHES = 8  # In one run. Each visits all objects of the process, in tens of milliseconds.

# (operator, line, module, dtype, number of dimensions, phase): equal for counterparts of a tensor in all steps.
_CounterpartKey = tuple[int, int, int, str, int, PhaseKind]


class GrowthWatch:
    """Detector of memory that accumulates over training steps, or over outermost module calls without training.

    It appends the holders that it finds to the trace, and also records the outermost module calls (`Trace.forwards`).
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.search = HolderSearch(recorder)
        self._in_step = False  # whether an optimizer's step is running, its closure included
        self._loop_first_storage = NONE  # index of the first storage of the first step
        self._last_begun_step = 0  # the last step that began; `_last_ended_step`: the last step that ended
        self._last_ended_step = 0
        self._last_begun_pass = (0, 0)  # step and micro-batch
        self._running_backward = 0  # the micro-batch whose backward pass is running; 0: none
        self._step_samples = _GrowthSamples()
        self._pass_samples = _GrowthSamples()  # of the micro-batches since an optimizer's step
        self._call_samples: dict[int, _GrowthSamples] = {}  # by module; of calls without a backward in between
        self._calls_first_storage = 0
        self._output_storages: set[int] = set()
        self._running_call: tuple[int, int, int, int, bool, int | None] | None = None
        self._num_searches = 0
        self._running_sums: list[Holder] = []  # that the last search has found
        self._searched_keys: set[_CounterpartKey] = set()  # keys whose holders have been searched

    def record_phase_begin(self, kind: PhaseKind, *, in_step: bool) -> None:
        """Record that a phase of `kind` begins; `in_step`: whether it is in the closure of an optimizer's step."""
        was_in_step, self._in_step = self._in_step, in_step or kind is PhaseKind.OPTIMIZER_STEP
        if self._running_backward and kind is not PhaseKind.BACKWARD:
            self._record_backward_end()
        if kind is PhaseKind.BACKWARD:
            self._running_backward = self._recorder.writer.phase.micro_batch
            if self._loop_first_storage == NONE:  # a program without modules
                self._loop_first_storage = len(self._recorder.trace.storages)
            self._record_step_begin()
            self.search.record_backward_begin()
            self._call_samples.clear()
            self._output_storages.clear()
        if was_in_step and not self._in_step:
            self._record_step_end()

    def record_call(self, module: nn.Module, index: int) -> None:
        """Record an outermost call, outside backward passes, of `module`, which has `index` in the trace."""
        trace = self._recorder.trace
        trace.failed_forward = None
        self._record_step_begin()
        if not self._call_samples:
            self._calls_first_storage = len(trace.storages)
        # Not under no_grad: torch.autograd.Function creates a node there too.
        sequence_number = autograd.get_sequence_nr() if torch.is_grad_enabled() else None
        if sequence_number is not None:
            self.search.record_call_begin()
        self._running_call = (
            len(trace.events),
            index,
            *self._recorder.attribution.find_caller_lines(),
            module.training,
            sequence_number,
        )

    def record_call_result(self, result: Any) -> None:
        """Record that the outermost module call has returned `result`."""
        if self._running_call is None:
            return
        (begin, module, source, caller, training, node_number), self._running_call = self._running_call, None
        with torch.DisableTorchFunction():
            returned = list(iterate_tensors(result))
            outputs = {self._recorder.storages.get_index(t) for t in returned} - {NONE}
            has_graph = node_number is not None and (not returned or any(t.requires_grad for t in returned))
        trace = self._recorder.trace
        nodes = autograd.get_sequence_nr() - node_number if node_number is not None and has_graph else 0
        output_indices = tuple(sorted(outputs))
        trace.forwards.append(
            Forward(begin, len(trace.events), module, source, training, nodes, output_indices, caller)
        )
        self._output_storages |= outputs
        samples = self._call_samples.setdefault(module, _GrowthSamples())
        # In training, tensors left by calls may still be used by a backward pass.
        if not (nodes and training) and samples.is_due():
            grown_keys = samples.find_grown_keys(
                self._sum_live_bytes(self._calls_first_storage, self._iterate_leftover_storages(nodes, begin)),
                MIN_CALL_GROWTH_BYTES,
            )
            self._search_holders(grown_keys, self._calls_first_storage)

    def record_out_of_memory(self) -> None:
        """Record that memory has run out, perhaps in an outermost call of a module; before the first one, what keeps
        the tensors of the line that has made most."""
        if self._running_call is not None and self._recorder.modules.current_index != NONE:
            trace, (begin, module, source, caller, training, node_number) = self._recorder.trace, self._running_call
            nodes = 0 if node_number is None else autograd.get_sequence_nr() - node_number
            trace.failed_forward = Forward(begin, len(trace.events), module, source, training, nodes, (), caller)
        if not self._recorder.trace.forwards and self._loop_first_storage == NONE:
            live_bytes = self._sum_live_bytes(0)
            self._search_holders({max(live_bytes, key=live_bytes.__getitem__)} if live_bytes else set(), 0)

    def find_sums_of_calls(self) -> None:
        """Search for what keeps the graphs of the calls since the last backward, if those are several."""
        if len(self.search.call_begins) >= MIN_CALLS:
            self._recorder.trace.holders += self.search.find_running_sums(self.search.call_begins)

    def record_run_end(self) -> None:
        """Record that the program has ended, while its variables are still alive."""
        if self._loop_first_storage != NONE and self._step_samples.num_rounds >= 2:
            self._search_holders(
                self._step_samples.find_grown_keys(self._sum_live_bytes(self._loop_first_storage)),
                self._loop_first_storage,
            )

    def _record_step_begin(self) -> None:
        if self._loop_first_storage == NONE:
            self._loop_first_storage = len(self._recorder.trace.storages)
        step = self._recorder.writer.phase.step
        if step > self._last_begun_step:
            self._last_begun_step = step
            self.search.record_step_begin()
        this_pass = step, self._recorder.writer.phase.micro_batch
        if this_pass > self._last_begun_pass:
            self._last_begun_pass = this_pass
            self.search.record_pass_begin()

    def _record_backward_end(self) -> None:
        """Record the end of a micro-batch's backward pass. None is looked at that may be the only one of its step, at
        whose end a sample is taken, unless no optimizer has stepped yet: the program may have none."""
        micro_batch, self._running_backward = self._running_backward, 0
        if self._loop_first_storage == NONE or (micro_batch == 1 and self._last_ended_step):
            return
        if self._pass_samples.is_due():
            grown_keys = self._pass_samples.find_grown_keys(
                self._sum_live_bytes(self._loop_first_storage), MIN_CALL_GROWTH_BYTES
            )
            if grown_keys - self._searched_keys:
                self._recorder.trace.holders += self.search.find_running_sums(self.search.pass_begins)
            self._search_holders(grown_keys, self._loop_first_storage)

    def _record_step_end(self) -> None:
        self._pass_samples = _GrowthSamples()
        # A step may have several optimizers: take one sample per step.
        self.search.record_step_end()
        step = self._recorder.writer.phase.step
        if self._loop_first_storage == NONE or step == self._last_ended_step:
            return
        self._last_ended_step = step
        if self._step_samples.is_due():
            self._search_holders(
                self._step_samples.find_grown_keys(self._sum_live_bytes(self._loop_first_storage)),
                self._loop_first_storage,
            )
            if self._step_samples.num_rounds in (2, _GrowthSamples.NUM_FIRST_ROUNDS):
                self._find_running_sums()

    def _find_running_sums(self) -> None:
        """Search for running sums. What a step updates after its optimizer is one only from the third step on, and what
        was computed from it has been taken for one until then."""
        sums, trace = self.search.find_running_sums(), self._recorder.trace
        if sums:
            trace.holders = [holder for holder in trace.holders if holder not in self._running_sums] + sums
            self._running_sums = sums

    def _iterate_leftover_storages(self, nodes: int, begin: int) -> Iterator[int]:
        """Yield the live storages that may accumulate over calls, of which the last began at the event `begin`.

        KV caches are excluded if the last call used them; so are, for calls without an autograd graph (`nodes` is 0),
        storages that modules allocate and do not return, unless the last call did not use them.
        """
        storages, owners = self._recorder.trace.storages, self._recorder.trace.owners
        unused = set(self._recorder.storages.iterate_unused_since(begin))
        for index in self._recorder.storages.list_live():
            if index in owners and owners[index].role is Role.KV_CACHE:
                if index in unused:
                    yield index
            elif nodes or storages[index].module == NONE or index in self._output_storages or index in unused:
                yield index

    def _make_counterpart_key(self, storage: Storage) -> _CounterpartKey:
        """Return the key that `storage` shares with its counterparts in other steps."""
        kind = self._recorder.trace.phases[storage.phase].kind
        return storage.op, storage.source, storage.module, storage.dtype, len(storage.shape), kind

    def _find_candidates(self, first_index: int, indices: Iterable[int]) -> Iterator[tuple[int, _CounterpartKey]]:
        """Yield (index, key) of those `indices` from `first_index` on that are GPU storages without a role, or with one
        in ROLES_PER_STEP (inputs and gradients), or of a KV cache."""
        trace = self._recorder.trace
        for index in indices:
            owner = trace.owners.get(index)
            if (
                index >= first_index
                and (owner is None or owner.role in ROLES_PER_STEP or owner.role is Role.KV_CACHE)
                and trace.storages[index].device != HOST
            ):
                yield index, self._make_counterpart_key(trace.storages[index])

    def _sum_live_bytes(self, first_index: int, indices: Iterable[int] | None = None) -> dict[_CounterpartKey, int]:
        """Return key -> bytes of the live storages from `first_index` on that may accumulate (`indices`; None: all)."""
        live_bytes: dict[_CounterpartKey, int] = defaultdict(int)
        for index, key in self._find_candidates(
            first_index, self._recorder.storages.list_live() if indices is None else indices
        ):
            live_bytes[key] += self._recorder.trace.storages[index].num_bytes
        return live_bytes

    def _search_holders(self, grown_keys: set[_CounterpartKey], first_index: int) -> None:
        grown_keys -= self._searched_keys
        if not grown_keys or self._num_searches == MAX_SEARCHES:
            return
        self._num_searches += 1
        self._searched_keys |= grown_keys
        live = self._recorder.storages.list_live()
        targets = {index: key for index, key in self._find_candidates(first_index, live) if key in grown_keys}
        found = self.search.find_holders(targets)
        explained = {targets[index] for holder in found for index in holder.storages if index in targets}
        rest = {index: key for index, key in targets.items() if key not in explained}
        self._recorder.trace.holders += found + self.search.find_cycles(rest)


class _GrowthSamples:
    """Samples of live bytes by key, taken after the first iterations and then at every power of two."""

    NUM_FIRST_ROUNDS = 3  # a round is an iteration: a step or a call

    def __init__(self) -> None:
        self.num_rounds = 0  # rounds so far
        self._sums: list[dict[_CounterpartKey, int]] = []

    def is_due(self) -> bool:
        """Count another round (step or call), and return whether a sample is due after it."""
        self.num_rounds += 1
        return self.num_rounds <= self.NUM_FIRST_ROUNDS or self.num_rounds & (self.num_rounds - 1) == 0

    def find_grown_keys(
        self, live_bytes: dict[_CounterpartKey, int], min_growth_bytes: int = 1
    ) -> set[_CounterpartKey]:
        """Add the sample `live_bytes`, and return the keys whose bytes grew in both of the last two samples; empty if
        none of them grew by `min_growth_bytes`."""
        self._sums = [*self._sums[-2:], live_bytes]
        if len(self._sums) < 3:
            return set()
        first, second, third = self._sums
        rises = {key: min(third[key] - second.get(key, 0), second.get(key, 0) - first.get(key, 0)) for key in third}
        grown = {key: rise for key, rise in rises.items() if rise > 0}
        return set(grown) if any(rise >= min_growth_bytes for rise in grown.values()) else set()
