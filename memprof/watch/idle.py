"""Search for the names of large tensors that the program keeps though no operator used them in a whole phase.

The trace shows which tensors are kept after their last use. What keeps them is visible only while the program runs, so
the program's objects are searched when a phase begins that computes, ever more rarely, at the end of the run, and when
memory runs out, which mostly ends it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from memprof.trace.events import HOST, ROLES_OF_MODELS, EventKind, PhaseKind, Role
from memprof.units import MIB
from memprof.watch.holders import HolderSearch
from memprof.watch.recorder import Recorder

MIN_BYTES = 16 * MIB  # of one line's tensors, or of all that have an owner: less is not worth a search

MAX_SEARCHES = 6  # in one run; each takes some tens of milliseconds

NUM_FIRST_PHASES = 12  # that compute, at each of which live tensors are looked at: four steps; then ever more rarely

_ROLES_OF_DATA = (Role.INPUT, Role.KV_CACHE)

_Key = Role | tuple[int, int]  # see `_make_key`


class IdleWatch:
    """Watch over the phases of a program for tensors that stay live without being used."""

    def __init__(self, recorder: Recorder, search: HolderSearch) -> None:
        self._recorder = recorder
        self._search = search
        self._num_phases = 0  # phases that compute
        self._last_begin = 0  # the event at which the last phase that computes has begun
        self._previous_begin = 0  # that of the one before
        self._searched: set[_Key] = set()
        self._num_searches = 0
        self._unused: list[int] = []  # positions in `Trace.idle_holders` of those with what was not used since

    def record_phase_begin(self, kind: PhaseKind) -> None:
        """Record that a phase begins, and search for the holders of what the last one has not used.

        A backward uses what its forward has saved, so that nothing is known to be idle when it begins; nor do forward
        and backward use the state of the optimizer.
        """
        if not kind.computes:
            return
        self._record_unused()
        self._num_phases += 1
        is_due = self._num_phases <= NUM_FIRST_PHASES or self._num_phases & (self._num_phases - 1) == 0
        if is_due and kind is not PhaseKind.BACKWARD:
            self._find_holders(self._last_begin, with_owners=kind is not PhaseKind.OPTIMIZER_STEP)
        self._previous_begin, self._last_begin = self._last_begin, len(self._recorder.trace.events)

    def _record_unused(self) -> None:
        """Record of the holders that were found that what they have is live and still not used, as a phase begins."""
        trace, table = self._recorder.trace, self._recorder.storages
        for position in self._unused.copy():
            holder = trace.idle_holders[position]
            if all(table.is_live(index) and table.get_last_use(index) < holder.event for index in holder.storages):
                trace.idle_holders[position] = holder._replace(unused_until=len(trace.events))
            else:
                self._unused.remove(position)

    def record_run_end(self) -> None:
        """Record the end of the program, with its variables still live."""
        self._find_holders(self._last_begin, with_owners=True)

    def record_out_of_memory(self) -> None:
        """Record that memory has run out, and search for the holders of what may be idle, in a phase that is not over.

        Parts of models: those that this phase has not used, though it may have been about to; findings know which of
        them belong to a model that another one has replaced. Other tensors: those that a whole phase before this one
        has not used, except what this step's forward made for its backward; and checkpoints that were loaded.
        """
        trace, table = self._recorder.trace, self._recorder.storages
        events, phase = trace.events, self._recorder.writer.phase
        phase_begin = next((i for i in range(len(events) - 1, -1, -1) if events[i].kind is EventKind.PHASE), 0)
        before = self._previous_begin if phase.kind.computes else self._last_begin
        num_elements = {
            math.prod(trace.storages[i].shape) for i, owner in trace.owners.items() if owner.role is Role.PARAMETER
        }
        idle: dict[int, _Key] = {}
        for index in list(table.iterate_unused_since(phase_begin)):  # a collection in the loop would free some
            owner, storage = trace.owners.get(index), trace.storages[index]
            if owner is None or owner.role in _ROLES_OF_DATA:
                made_in = trace.phases[storage.phase]
                is_of_step = made_in.kind is PhaseKind.FORWARD and made_in.step == phase.step
                is_checkpoint = trace.op(storage) == "torch.load" and math.prod(storage.shape) in num_elements
                is_idle = is_checkpoint or (table.get_last_use(index) < before and not is_of_step)
            else:
                is_idle = owner.role in ROLES_OF_MODELS
            if is_idle and storage.device != HOST:
                idle[index] = self._make_key(index)
        self._append_holders(idle)

    def _find_holders(self, before: int, *, with_owners: bool) -> None:
        """Search for holders of the live tensors that were last used before the event `before`, if they are large."""
        if self._num_searches == MAX_SEARCHES:
            return
        trace, table = self._recorder.trace, self._recorder.storages
        idle: dict[int, _Key] = {}
        for index in table.iterate_unused_since(before):
            owner = trace.owners.get(index)
            if trace.storages[index].device != HOST and (
                owner is None or owner.role in _ROLES_OF_DATA or (with_owners and owner.role in ROLES_OF_MODELS)
            ):
                key = self._make_key(index)
                if key not in self._searched:
                    idle[index] = key
        if large := self._append_holders(idle):
            self._num_searches += 1
            self._searched |= large

    def _append_holders(self, idle: Mapping[int, _Key]) -> set[_Key]:
        """Append to the trace the holders of the storages in `idle`, which has their keys; return the keys with
        at least MIN_BYTES, without which nothing is searched."""
        trace = self._recorder.trace
        num_bytes: dict[_Key, int] = {}
        for index, key in idle.items():
            num_bytes[key] = num_bytes.get(key, 0) + trace.storages[index].num_bytes
        large = {key for key, size in num_bytes.items() if size >= MIN_BYTES}
        for of_models in (False, True):
            # A model is named as a whole, and each other tensor by a variable of its own.
            targets = {
                index: key if of_models else index
                for index, key in idle.items()
                if key in large and isinstance(key, Role) == of_models
            }
            if targets:
                garbage = self._search.find_garbage(targets)
                unreachable = {index for holder in garbage for index in holder.storages}
                rest = {index: key for index, key in targets.items() if index not in unreachable}
                trace.idle_holders += garbage
                first = len(trace.idle_holders)  # that the program may use again
                trace.idle_holders += self._search.find_holders(rest, outermost=of_models)
                self._unused += range(first, len(trace.idle_holders))
        return large

    def _make_key(self, index: int) -> _Key:
        """Return the role of a part of a model, or the line and operator that made another tensor."""
        trace = self._recorder.trace
        owner, storage = trace.owners.get(index), trace.storages[index]
        return owner.role if owner is not None and owner.role in ROLES_OF_MODELS else (storage.source, storage.op)
