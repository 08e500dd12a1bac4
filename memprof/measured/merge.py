"""Marks and allocations of a measured run, put in order of time: the Trace."""

from __future__ import annotations

import bisect
from collections import defaultdict

from memprof.measured.events import DEFAULT_STREAM, Allocation, Recorded
from memprof.measured.history import DEFAULT_POOL
from memprof.measured.marks import Claim, Marks
from memprof.trace.events import (
    CPU,
    HOST,
    NONE,
    Event,
    EventKind,
    Owner,
    Role,
    Sample,
    Storage,
    StreamEvent,
    Trace,
    Use,
    Wait,
    is_card,
)

_RELEASE_ORDER, _FREE_ORDER, _RETIRE_ORDER, _MARK_ORDER, _ALLOC_ORDER = range(5)
"""Of what happened in the same nanosecond."""
_FIRST_AWAITED = 1 << 20
"""Numbers of streams from here on are none of the program's."""


class _Merge:
    """Walks the run once, in order of time."""

    def __init__(self, trace: Trace, marks: Marks, recorded: Recorded, sources: list[int]) -> None:
        self.trace = trace
        self._marks = marks
        self._recorded = recorded
        self._module_sources = sources
        """Line of each module's forward, as an index of the trace's sources."""
        self._ops: dict[str, int] = {}
        self._lines = {line: index for index, line in enumerate(trace.sources)}
        self._phase = NONE
        self._modules: list[int] = []
        self._streams = {DEFAULT_STREAM: 0}
        """The driver's name of a stream -> its number in the trace; pools: the allocator's."""
        self._pools = {DEFAULT_POOL: 0}
        self._current = {EventKind.STREAM: 0, EventKind.POOL: 0}
        self._awaited: dict[int, int] = {}
        """Storage -> the stream that stands for whatever its memory waits for, which no recording names."""

    def run(self) -> None:
        recorded, marks, events = self._recorded, self._marks, self.trace.events
        claims = self._claims()
        times: list[int] = []
        pending = sorted((time_ns, number) for number, time_ns in recorded.forward)
        places: dict[int, tuple[int, int]] = {}
        position = 0
        index_of: dict[int, int] = {}
        for time_ns, kind, number in self._order():
            while position < len(pending) and pending[position][0] <= time_ns:
                places[pending[position][1]] = (len(events), self._modules[-1] if self._modules else NONE)
                position += 1
            if kind == _MARK_ORDER:
                mark = marks.marks[number]
                events.append(Event(mark.kind, mark.ref))
                if mark.kind is EventKind.PHASE:
                    self._phase = mark.ref
                elif mark.kind is EventKind.ENTER:
                    self._modules.append(mark.ref)
                elif mark.kind is EventKind.EXIT and self._modules:
                    self._modules.pop()
            elif kind == _RETIRE_ORDER:
                pool = self._pools.get(recorded.retired[number][1])
                if pool is not None:
                    events.append(Event(EventKind.POOL_FREE, pool))
            elif kind == _ALLOC_ORDER:
                item = recorded.allocations[number]
                if not item.num_bytes or self._phase == NONE:
                    continue
                self._take_on(item)
                index_of[number] = self._storage(item, places, claims.get(number, ()))
                events.append(Event(EventKind.ALLOC, index_of[number]))
            elif number not in index_of:
                continue
            elif kind == _FREE_ORDER:
                self._free(recorded.allocations[number], index_of[number])
            else:
                self._release(index_of[number])
            times += [time_ns] * (len(events) - len(times))
        self.trace.ops, self.trace.sources = list(self._ops), list(self._lines)
        begin = times[0] if times else 0
        self.trace.times = [time_ns - begin for time_ns in times]
        for time_ns, counters in marks.readings:
            event = bisect.bisect_right(times, time_ns) - 1
            self.trace.samples.append(Sample(event, (time_ns - begin) / 1e9, *counters))

    def _order(self) -> list[tuple[int, int, int]]:
        """Time, kind and number of all that happened, in order."""
        recorded, marks = self._recorded, self._marks
        order = [(mark.time_ns, _MARK_ORDER, number) for number, mark in enumerate(marks.marks)]
        order += [(time_ns, _RETIRE_ORDER, number) for number, (time_ns, _) in enumerate(recorded.retired)]
        for number, allocation in enumerate(recorded.allocations):
            order.append((allocation.time_ns, _ALLOC_ORDER, number))
            if allocation.freed_ns is not None:
                order.append((allocation.freed_ns, _FREE_ORDER, number))
            if allocation.released_ns is not None:
                order.append((allocation.released_ns, _RELEASE_ORDER, number))
        return sorted(order)

    def _take_on(self, item: Allocation) -> None:
        """What is taken next is on the stream and from the pool of `item`."""
        if not is_card(item.device):
            return
        stream = self._streams.setdefault(item.stream, len(self._streams))
        pool = self._pools.setdefault(item.pool, len(self._pools))
        for kind, number in ((EventKind.STREAM, stream), (EventKind.POOL, pool)):
            if self._current[kind] != number:
                self._current[kind] = number
                self.trace.events.append(Event(kind, number))

    def _free(self, item: Allocation, storage: int) -> None:
        """It is freed; if its memory is not free at once, a stream of its own is what it waits for."""
        trace = self.trace
        if item.released_ns is not None:
            self._awaited[storage] = _FIRST_AWAITED + len(self._awaited)
            trace.events.append(Event(EventKind.USE, len(trace.uses)))
            trace.uses.append(Use(storage, self._awaited[storage]))
        trace.events.append(Event(EventKind.FREE, storage))

    def _release(self, storage: int) -> None:
        trace = self.trace
        trace.events.append(Event(EventKind.WAIT, len(trace.waits)))
        done = StreamEvent(trace.device, self._awaited[storage], len(trace.events))
        trace.waits.append(Wait(by_host=True, done=(done,)))

    def _claims(self) -> dict[int, list[Claim]]:
        """Number of an allocation -> what it was claimed to be."""
        by_address: dict[int, list[int]] = defaultdict(list)
        for number, allocation in enumerate(self._recorded.allocations):
            by_address[allocation.address].append(number)
        found: dict[int, list[Claim]] = defaultdict(list)
        for claim in self._marks.claims:
            for number in reversed(by_address.get(claim.address, ())):
                allocation = self._recorded.allocations[number]
                if allocation.time_ns <= claim.time_ns and (
                    allocation.freed_ns is None or allocation.freed_ns > claim.time_ns
                ):
                    found[number].append(claim)
                    break
        return found

    def _storage(self, item: Allocation, places: dict[int, tuple[int, int]], claims: list[Claim] | tuple[()]) -> int:
        trace = self.trace
        index = len(trace.storages)
        module = self._modules[-1] if self._modules else NONE
        source = self._module_sources[module] if module != NONE else NONE
        if item.place.source is not None:
            source = self._lines.setdefault(item.place.source, len(self._lines))
        forward_event = NONE
        if item.place.sequence in places and not self._modules:
            # A backward operator belongs to the module whose forward it differentiates.
            forward_event, module = places[item.place.sequence]
            source = self._module_sources[module] if module != NONE else NONE
        # Measured on the CPU, all that the program does is on the device in question.
        device = trace.device if trace.device == CPU or is_card(item.device) else HOST
        shape, dtype = item.shape, item.dtype
        if self._modules:  # what a module makes and another model is given is no input
            claims = [claim for claim in claims if claim.owner.role is not Role.INPUT]
        if claims:
            claim = next((one for one in claims if one.owner.name), claims[0])
            trace.owners[index] = Owner(*claim.owner)
            shape, dtype = claim.shape, claim.dtype
            if claim.on_host:
                device = HOST
        trace.storages.append(
            Storage(
                item.num_bytes,
                shape if shape is not None else (item.num_bytes,),
                dtype if dtype is not None else "uint8",
                device,
                self._ops.setdefault(item.place.op, len(self._ops)),
                module,
                source,
                self._phase,
                forward_event,
                hidden=not claims and item.is_temporary,
            )
        )
        return index


def merge(trace: Trace, marks: Marks, recorded: Recorded, sources: list[int]) -> None:
    """Fill `trace`, which has its device, modules and sources, with events, storages, owners and samples.

    `sources` has for each module of the trace the line of its forward, as an index of the trace's sources.
    """
    trace.phases = list(marks.phases)
    _Merge(trace, marks, recorded, sources).run()
