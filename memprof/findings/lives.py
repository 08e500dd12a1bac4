"""When each storage was born and when it died: found once per trace, for rules ask who lived together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memprof.allocator.rounding import round_size
from memprof.ledger.ledger import Ledger
from memprof.trace.events import EventKind


class Together(NamedTuple):
    """The storages of a set that are alive at one moment."""

    num_bytes: int
    """Sum of their blocks, rounded as the allocator does."""
    event: int
    """The moment, as an index of Trace.events."""
    storages: tuple[int, ...]


class Lives:
    """Birth and death of every storage, as events; what never dies has the end of the trace as its death."""

    __slots__ = ("_allocated", "at_peak", "births", "deaths")

    def __init__(self, ledger: Ledger) -> None:
        """Read the whole trace of `ledger` once."""
        trace = ledger.trace
        end = len(trace.events)
        # A storage that was never allocated (a broken or cut trace) is born when everything is over.
        self.births = births = [end] * len(trace.storages)
        self.deaths = deaths = [end] * len(trace.storages)
        alloc, free = EventKind.ALLOC, EventKind.FREE
        for time, (kind, ref) in enumerate(trace.events):
            if kind is alloc:
                births[ref] = time
            elif kind is free:
                deaths[ref] = time
        self._allocated = [round_size(s.num_bytes) if s.device == trace.device else 0 for s in trace.storages]
        peak = ledger.peak_event
        self.at_peak = frozenset(
            i
            for i, birth in enumerate(births)
            if birth <= peak < deaths[i] and trace.storages[i].device == trace.device
        )
        """Storages on the GPU that are alive at the peak of the run."""

    def sum_bytes(self, storages: Iterable[int]) -> int:
        """Bytes of the blocks of these storages; host memory counts nothing."""
        return sum(self._allocated[index] for index in storages)

    def at(self, time: int, storages: Iterable[int]) -> Together:
        """Those of `storages` that are alive after the event at `time`."""
        alive = tuple(index for index in storages if self.births[index] <= time < self.deaths[index])
        return Together(self.sum_bytes(alive), time, alive)

    def most(self, storages: Iterable[int]) -> Together:
        """The moment at which the bytes of `storages` sum to the most, the earliest if there are several."""
        known = list(storages)
        changes = [(self.births[index], self._allocated[index]) for index in known]
        changes += [(self.deaths[index], -self._allocated[index]) for index in known]
        changes.sort()
        now = most = 0
        when = -1
        for time, change in changes:
            now += change
            if now > most:
                most, when = now, time
        return self.at(when, known)
