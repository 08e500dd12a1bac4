"""Search for the names of large tensors that the program keeps though no operator used them in a whole phase.

The trace shows which tensors are kept after their last use. What keeps them is visible only while the program runs, so
the program's objects are searched when a phase begins that computes, ever more rarely, and at the end of the run.
"""

from __future__ import annotations

from memprof.trace.events import HOST, ROLES_OF_MODELS, PhaseKind
from memprof.units import MIB
from memprof.watch.holders import HolderSearch
from memprof.watch.recorder import Recorder

MIN_BYTES = 16 * MIB  # of one line's tensors, or of all that have an owner: less is not worth a search

MAX_SEARCHES = 6  # in one run; each takes some tens of milliseconds

NUM_FIRST_PHASES = 12  # that compute, at each of which live tensors are looked at: four steps; then ever more rarely


class IdleWatch:
    """Watch over the phases of a program for tensors that stay live without being used."""

    def __init__(self, recorder: Recorder, search: HolderSearch) -> None:
        self._recorder = recorder
        self._search = search
        self._num_phases = 0  # phases that compute
        self._last_begin = 0  # the event at which the last phase that computes has begun
        self._searched: set[object] = set()  # keys that were searched; see `_make_key`
        self._num_searches = 0

    def record_phase_begin(self, kind: PhaseKind) -> None:
        """Record that a phase begins, and search for the holders of what the last one has not used.

        A backward uses what its forward has saved, so that nothing is known to be idle when it begins; nor do forward
        and backward use the state of the optimizer.
        """
        if not kind.computes:
            return
        self._num_phases += 1
        is_due = self._num_phases <= NUM_FIRST_PHASES or self._num_phases & (self._num_phases - 1) == 0
        if is_due and kind is not PhaseKind.BACKWARD:
            self._find_holders(self._last_begin, with_owners=kind is not PhaseKind.OPTIMIZER_STEP)
        self._last_begin = len(self._recorder.trace.events)

    def record_run_end(self) -> None:
        """Record the end of the program, with its variables still live."""
        self._find_holders(self._last_begin, with_owners=True)

    def _find_holders(self, before: int, *, with_owners: bool) -> None:
        """Search for holders of the live tensors that were last used before the event `before`, if they are large."""
        if self._num_searches == MAX_SEARCHES:
            return
        trace, table = self._recorder.trace, self._recorder.storages
        num_bytes: dict[object, int] = {}
        idle: dict[int, object] = {}
        for index in table.iterate_unused_since(before):
            owner = trace.owners.get(index)
            if trace.storages[index].device != HOST and (
                owner is None or (with_owners and owner.role in ROLES_OF_MODELS)
            ):
                key = idle[index] = self._make_key(index)
                num_bytes[key] = num_bytes.get(key, 0) + trace.storages[index].num_bytes
        large = {key for key, size in num_bytes.items() if size >= MIN_BYTES and key not in self._searched}
        if large:
            self._num_searches += 1
            self._searched |= large
            for owned in (False, True):
                targets = {i: key for i, key in idle.items() if key in large and (i in trace.owners) == owned}
                if targets:
                    trace.idle_holders += self._search.find_holders(targets, outermost=owned)

    def _make_key(self, index: int) -> object:
        """Return the owner's role, or the line and operator that made an ownerless tensor."""
        trace = self._recorder.trace
        owner, storage = trace.owners.get(index), trace.storages[index]
        return (storage.source, storage.op) if owner is None else owner.role
