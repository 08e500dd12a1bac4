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
from memprof.watch.caches import tensors_in
from memprof.watch.holders import HolderSearch
from memprof.watch.recorder import Recorder

MIN_CALL_BYTES = 64 << 10  # growth over calls of a model is searched from this size on; a decoder's tokens are less

MAX_SEARCHES = 8  # In one run. Each looks through all objects of the process, some tens of milliseconds.

# Operator, line, module, dtype, number of dimensions, phase: equal for the counterparts of a tensor in other steps.
_Key = tuple[int, int, int, str, int, PhaseKind]


class GrowthWatch:
    """Steps and outermost calls of a program, watched for memory that accumulates over them.

    Both steps and calls have their state here: hence the number of attributes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._search = HolderSearch(recorder)
        self._in_step = False  # whether an optimizer's step runs, or the closure in the step
        self._loop_begin = NONE  # the first storage of the first step
        self._step = 0  # the last step that began; `_ended`: the last step that ended
        self._ended = 0
        self._steps = _GrowthSamples()
        self._calls: dict[int, _GrowthSamples] = {}  # of calls without a backward between them, by module
        self._calls_begin = 0
        self._outputs: set[int] = set()
        self._call: tuple[int, int, int, bool, int | None] | None = None
        self._searches = 0
        self._has_sums = False  # whether running sums were found
        self._explained: set[_Key] = set()  # keys whose holders have been searched

    def phase_begins(self, kind: PhaseKind, *, in_step: bool) -> None:
        """Record that a phase begins; `in_step` is true for a phase in the closure of an optimizer's step."""
        before, self._in_step = self._in_step, in_step or kind is PhaseKind.OPTIMIZER_STEP
        if kind is PhaseKind.BACKWARD:
            self._note_step_begin()
            self._calls.clear()
            self._outputs.clear()
        if before and not self._in_step:
            self._note_step_end()

    def call_begins(self, module: nn.Module, index: int) -> None:
        """Record that a module is called from outside all other modules, not in a backward pass."""
        trace = self._recorder.trace
        self._note_step_begin()
        if self._loop_begin == NONE:
            self._loop_begin = len(trace.storages)
        if not self._calls:
            self._calls_begin = len(trace.storages)
        # torch.autograd.Function makes a node under no_grad, too, without inputs.
        number = autograd.get_sequence_nr() if torch.is_grad_enabled() else None
        self._call = (len(trace.events), index, self._recorder.attribution.caller(), module.training, number)

    def call_returned(self, result: Any) -> None:
        """Record that the outermost module call returned `result`."""
        if self._call is None:
            return
        (begin, module, source, training, number), self._call = self._call, None
        with torch.DisableTorchFunction():
            returned = list(tensors_in(result))
            outputs = {self._recorder.storages.index_of(tensor) for tensor in returned} - {NONE}
            has_graph = number is not None and (not returned or any(tensor.requires_grad for tensor in returned))
        trace = self._recorder.trace
        nodes = autograd.get_sequence_nr() - number if number is not None and has_graph else 0
        made = tuple(sorted(outputs))
        trace.forwards.append(Forward(begin, len(trace.events), module, source, training, nodes, made))
        self._outputs |= outputs
        samples = self._calls.setdefault(module, _GrowthSamples())
        # In training, tensors left by calls may still be used by a backward pass.
        if not (nodes and training) and samples.is_due():
            grown = samples.find_grown_keys(
                self._sum_live_bytes(self._calls_begin, self._call_leftovers(nodes)), MIN_CALL_BYTES
            )
            self._search_holders(grown, self._calls_begin)

    def run_ends(self) -> None:
        """Record the end of the program, with its variables still live."""
        if self._loop_begin != NONE and self._steps.count >= 2:
            self._search_holders(self._steps.find_grown_keys(self._sum_live_bytes(self._loop_begin)), self._loop_begin)

    def _note_step_begin(self) -> None:
        step = self._recorder.writer.phase.step
        if step > self._step:
            self._step = step
            self._search.step_began()

    def _note_step_end(self) -> None:
        # A step may have several optimizers: one look a step.
        self._search.step_ended()
        step = self._recorder.writer.phase.step
        if self._loop_begin == NONE or step == self._ended:
            return
        self._ended = step
        if self._steps.is_due():
            self._search_holders(self._steps.find_grown_keys(self._sum_live_bytes(self._loop_begin)), self._loop_begin)
            if not self._has_sums and self._steps.count in (2, _GrowthSamples.FIRST):
                sums = self._search.running_sums()
                self._has_sums = bool(sums)
                self._recorder.trace.holders += sums

    def _call_leftovers(self, nodes: int) -> Iterator[int]:
        """Yield the storages that may accumulate between calls: outputs, and tensors that the program makes from
        outputs. Storages that modules keep (a KV cache) are excluded for calls without an autograd graph."""
        storages = self._recorder.trace.storages
        for index in self._recorder.storages.live.values():
            if nodes or storages[index].module == NONE or index in self._outputs:
                yield index

    def _counterpart_key(self, storage: Storage) -> _Key:
        """Return the key that a storage shares with its counterparts in other steps; gradients have their own phase."""
        kind = self._recorder.trace.phases[storage.phase].kind
        return storage.op, storage.source, storage.module, storage.dtype, len(storage.shape), kind

    def _find_candidates(self, first: int, among: Iterable[int]) -> Iterator[tuple[int, _Key]]:
        """Yield (index, key) of GPU storages made from `first` on, without a role or with a role of ROLES_PER_STEP."""
        trace = self._recorder.trace
        for index in among:
            owner = trace.owners.get(index)
            if (
                index >= first
                and (owner is None or owner.role in ROLES_PER_STEP)
                and trace.storages[index].device != HOST
            ):
                yield index, self._counterpart_key(trace.storages[index])

    def _sum_live_bytes(self, first: int, among: Iterable[int] | None = None) -> dict[_Key, int]:
        """Return the bytes per key of the storages that were made from `first` on and may accumulate."""
        held: dict[_Key, int] = defaultdict(int)
        for index, key in self._find_candidates(
            first, self._recorder.storages.live.values() if among is None else among
        ):
            held[key] += self._recorder.trace.storages[index].num_bytes
        return held

    def _search_holders(self, grown: set[_Key], first: int) -> None:
        grown -= self._explained
        if not grown or self._searches == MAX_SEARCHES:
            return
        self._searches += 1
        self._explained |= grown
        live = self._recorder.storages.live.values()
        targets = {index: key for index, key in self._find_candidates(first, live) if key in grown}
        self._recorder.trace.holders += self._search.holders_of(targets)


class _GrowthSamples:
    """Sums of live bytes at the ends of the first rounds, and ever more rarely after these."""

    FIRST = 3

    def __init__(self) -> None:
        self.count = 0  # rounds so far
        self._sums: list[dict[_Key, int]] = []

    def is_due(self) -> bool:
        """Count another round; return whether this round's sums are due."""
        self.count += 1
        return self.count <= self.FIRST or self.count & (self.count - 1) == 0

    def find_grown_keys(self, held: dict[_Key, int], least: int = 1) -> set[_Key]:
        """Return the keys whose sums grew in both of the last two samples; empty if no sum grew by `least` bytes."""
        self._sums = [*self._sums[-2:], held]
        if len(self._sums) < 3:
            return set()
        first, second, third = self._sums
        rises = {key: min(third[key] - second.get(key, 0), second.get(key, 0) - first.get(key, 0)) for key in third}
        grown = {key: rise for key, rise in rises.items() if rise > 0}
        return set(grown) if any(rise >= least for rise in grown.values()) else set()
