"""Watches a program that names no phases of its own for memory that piles up, and asks at once who keeps it.

The trace alone says what piles up. Who keeps it can only be seen while the program runs: the list is gone when the
function that filled it has returned. So what is live is summed up now and then (at the ends of the first few steps and
calls, then ever more rarely), and only where a sum grew twice in a row are the program's own objects searched.
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

MIN_CALL_BYTES = 64 << 10  # what calls of a model leave behind is looked into from this on; a decoder's tokens are less

MAX_SEARCHES = 8  # In one run. Each looks through all objects of the process, some tens of milliseconds.

# Operator, line, module, dtype and number of dimensions: what makes the counterparts of one tensor in other steps.
_Key = tuple[int, int, int, str, int, PhaseKind]


class GrowthWatch:
    """The calls and phases of a program that one `VirtualGpu` tells of.

    It looks at steps and at calls, whose states are both here: hence the number of attributes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._search = HolderSearch(recorder)
        self._in_step = False  # whether an optimizer steps, or the closure that it calls
        self._loop_begin = NONE  # the first storage of the first step
        self._step = 0  # the last that began, and `_ended` the last whose end was seen
        self._ended = 0
        self._steps = _Looks()
        self._calls: dict[int, _Looks] = {}  # of calls without a backward between them, by module
        self._calls_begin = 0
        self._outputs: set[int] = set()
        self._call: tuple[int, int, int, bool, int | None] | None = None
        self._searches = 0
        self._has_sums = False  # whether running sums were found
        self._explained: set[_Key] = set()  # what has been searched for

    def phase_begins(self, kind: PhaseKind, *, in_step: bool) -> None:
        """See a phase recognised, which may be that of a closure `in_step` of an optimizer."""
        before, self._in_step = self._in_step, in_step or kind is PhaseKind.OPTIMIZER_STEP
        if kind is PhaseKind.BACKWARD:
            self._step_begins()
            self._calls.clear()
            self._outputs.clear()
        if before and not self._in_step:
            self._step_ended()

    def call_begins(self, module: nn.Module, index: int) -> None:
        """See a module called from outside all others, not in a backward pass."""
        trace = self._recorder.trace
        self._step_begins()
        if self._loop_begin == NONE:
            self._loop_begin = len(trace.storages)
        if not self._calls:
            self._calls_begin = len(trace.storages)
        # torch.autograd.Function makes a node under no_grad, too, on which nothing hangs.
        number = autograd.get_sequence_nr() if torch.is_grad_enabled() else None
        self._call = (len(trace.events), index, self._recorder.attribution.caller(), module.training, number)

    def call_returned(self, result: Any) -> None:
        """See that call return `result`."""
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
        looks = self._calls.setdefault(module, _Looks())
        # In training, what calls leave is for a backward that may still come.
        if not (nodes and training) and looks.is_due():
            grown = looks.grown(self._held(self._calls_begin, self._left_by_calls(nodes)), MIN_CALL_BYTES)
            self._explain(grown, self._calls_begin)

    def run_ends(self) -> None:
        """See the program come to its end, its variables still there."""
        if self._loop_begin != NONE and self._steps.count >= 2:
            self._explain(self._steps.grown(self._held(self._loop_begin)), self._loop_begin)

    def _step_begins(self) -> None:
        step = self._recorder.writer.phase.step
        if step > self._step:
            self._step = step
            self._search.step_began()

    def _step_ended(self) -> None:
        # A step may have several optimizers: one look a step.
        self._search.step_ended()
        step = self._recorder.writer.phase.step
        if self._loop_begin == NONE or step == self._ended:
            return
        self._ended = step
        if self._steps.is_due():
            self._explain(self._steps.grown(self._held(self._loop_begin)), self._loop_begin)
            if not self._has_sums and self._steps.count in (2, _Looks.FIRST):
                sums = self._search.running_sums()
                self._has_sums = bool(sums)
                self._recorder.trace.holders += sums

    def _left_by_calls(self, nodes: int) -> Iterator[int]:
        """Yield what piles up between calls: outputs, and what the program makes of them. What modules keep for
        themselves (a KV cache) is theirs; of a call with gradients, the graph is not."""
        storages = self._recorder.trace.storages
        for index in self._recorder.storages.live.values():
            if nodes or storages[index].module == NONE or index in self._outputs:
                yield index

    def _key(self, storage: Storage) -> _Key:
        """Return what counterparts have in common; a gradient may have all but the phase of an output."""
        kind = self._recorder.trace.phases[storage.phase].kind
        return storage.op, storage.source, storage.module, storage.dtype, len(storage.shape), kind

    def _may_pile_up(self, first: int, among: Iterable[int]) -> Iterator[tuple[int, _Key]]:
        """Yield storages on GPUs, made from `first` on, without a role or with one that those of every step have."""
        trace = self._recorder.trace
        for index in among:
            owner = trace.owners.get(index)
            if (
                index >= first
                and (owner is None or owner.role in ROLES_PER_STEP)
                and trace.storages[index].device != HOST
            ):
                yield index, self._key(trace.storages[index])

    def _held(self, first: int, among: Iterable[int] | None = None) -> dict[_Key, int]:
        """Return bytes by key of what was made from `first` on and may pile up."""
        held: dict[_Key, int] = defaultdict(int)
        for index, key in self._may_pile_up(first, self._recorder.storages.live.values() if among is None else among):
            held[key] += self._recorder.trace.storages[index].num_bytes
        return held

    def _explain(self, grown: set[_Key], first: int) -> None:
        grown -= self._explained
        if not grown or self._searches == MAX_SEARCHES:
            return
        self._searches += 1
        self._explained |= grown
        live = self._recorder.storages.live.values()
        targets = {index: key for index, key in self._may_pile_up(first, live) if key in grown}
        self._recorder.trace.holders += self._search.holders_of(targets)


class _Looks:
    """Sums of what is held at the ends of the first rounds, and then ever more rarely."""

    FIRST = 3

    def __init__(self) -> None:
        self.count = 0  # rounds so far
        self._held: list[dict[_Key, int]] = []

    def is_due(self) -> bool:
        """Count another round; return whether to look."""
        self.count += 1
        return self.count <= self.FIRST or self.count & (self.count - 1) == 0

    def grown(self, held: dict[_Key, int], least: int = 1) -> set[_Key]:
        """Return what has grown at each of the last two looks, this one included, if some did by `least` bytes."""
        self._held = [*self._held[-2:], held]
        if len(self._held) < 3:
            return set()
        first, second, third = self._held
        rises = {key: min(third[key] - second.get(key, 0), second.get(key, 0) - first.get(key, 0)) for key in third}
        grown = {key: rise for key, rise in rises.items() if rise > 0}
        return set(grown) if any(rise >= least for rise in grown.values()) else set()
