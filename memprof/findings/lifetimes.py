"""Lifetimes of all storages of a trace, and queries: which are live together, and how much savings reduce the peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from memprof.allocator.rounding import round_request
from memprof.ledger.ledger import Ledger


class LiveSet(NamedTuple):
    """Storages that are live at one event of the trace."""

    num_bytes: int  # sum of their blocks, rounded up as the allocator does
    event: int  # index of the event in Trace.events
    storages: tuple[int, ...]


class Saving(NamedTuple):
    """Bytes that a fix would save from event index `begin` until before event index `end`."""

    begin: int
    end: int
    num_bytes: int


class Lifetimes:
    """Event indices of each storage's allocation (`births`) and free (`deaths`; the end of the trace if not freed)."""

    def __init__(self, ledger: Ledger) -> None:
        """Compute the lifetimes of all storages in the trace of `ledger`."""
        trace = ledger.trace
        self.births, self.deaths = births, deaths = trace.lifetimes()
        self._allocated = [
            round_request(s.num_bytes, s.device) if s.device == trace.device else 0 for s in trace.storages
        ]
        self._curve = ledger.allocated
        peak = ledger.peak_event
        # Storages on the GPU that are live at the peak of the run.
        self.at_peak = frozenset(
            i
            for i, birth in enumerate(births)
            if birth <= peak < deaths[i] and trace.storages[i].device == trace.device
        )

    def sum_bytes(self, storages: Iterable[int]) -> int:
        """Return the bytes of the GPU blocks of `storages`; storages in host memory count as 0."""
        return sum(self._allocated[index] for index in storages)

    def find_largest_at_peak(self) -> int:
        """Return the largest storage at the peak."""
        return max(self.at_peak, key=self._allocated.__getitem__)

    def find_live(self, event: int, storages: Iterable[int]) -> LiveSet:
        """Return the subset of `storages` that is live after the event with index `event`."""
        live = tuple(index for index in storages if self.births[index] <= event < self.deaths[index])
        return LiveSet(self.sum_bytes(live), event, live)

    def peak_reduction(self, savings: Sequence[Saving]) -> int:
        """Return by how many bytes the peak of allocated memory would be lower with `savings`."""
        changes = [(s.begin, -s.num_bytes) for s in savings] + [(s.end, s.num_bytes) for s in savings]
        changes.sort()
        change_bytes = new_peak = begin = 0
        for event, change in [*changes, (len(self._curve), 0)]:
            if event > begin:
                new_peak = max(new_peak, max(self._curve[begin:event], default=0) + change_bytes)
                begin = event
            change_bytes += change
        return max(max(self._curve) - new_peak, 0)

    def savings(self, storages: Iterable[int], share: float = 1.0) -> list[Saving]:
        """Return savings of the fraction `share` of the bytes of each storage, over the storage's lifetime."""
        return [
            Saving(self.births[index], self.deaths[index], int(self._allocated[index] * share)) for index in storages
        ]

    def savings_beyond(self, sets: Iterable[Sequence[int]], num_kept: int, *, oldest: bool = False) -> list[Saving]:
        """Return the savings if only the `num_kept` newest (or `oldest`) of the live `sets` were live at each event."""
        spans = [
            (min(self.births[index] for index in own), max(self.deaths[index] for index in own), self.sum_bytes(own))
            for own in sets
        ]
        times = sorted({time for begin, end, _ in spans for time in (begin, end)})
        result = []
        for begin, end in pairwise(times):
            live_spans = sorted((span for span in spans if span[0] <= begin and end <= span[1]), reverse=not oldest)
            if rest := sum(num_bytes for _, _, num_bytes in live_spans[num_kept:]):
                result.append(Saving(begin, end, rest))
        return result

    def find_max_live(self, storages: Iterable[int]) -> LiveSet:
        """Return the live subset of `storages` at the first event at which its sum of bytes is largest."""
        indices = list(storages)
        changes = [(self.births[index], self._allocated[index]) for index in indices]
        changes += [(self.deaths[index], -self._allocated[index]) for index in indices]
        changes.sort()
        live_bytes = max_bytes = 0
        max_event = -1
        for event, change in changes:
            live_bytes += change
            if live_bytes > max_bytes:
                max_bytes, max_event = live_bytes, event
        return self.find_live(max_event, indices)
