"""Marks and allocations of a measured run, put in order of time: the Trace."""

from __future__ import annotations

import bisect
from collections import defaultdict

from memprof.measured.events import Allocation, Recorded
from memprof.measured.marks import Claim, Marks
from memprof.trace.events import CPU, HOST, NONE, Event, EventKind, Owner, Role, Sample, Storage, Trace

_FREE_ORDER, _MARK_ORDER, _ALLOC_ORDER = range(3)
"""Of what happened in the same nanosecond."""


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

    def run(self) -> None:
        recorded, marks, events = self._recorded, self._marks, self.trace.events
        claims = self._claims()
        order: list[tuple[int, int, int, object]] = []
        for number, allocation in enumerate(recorded.allocations):
            order.append((allocation.time_ns, _ALLOC_ORDER, number, allocation))
            if allocation.freed_ns is not None:
                order.append((allocation.freed_ns, _FREE_ORDER, number, None))
        order += [(mark.time_ns, _MARK_ORDER, number, mark) for number, mark in enumerate(marks.marks)]
        order.sort(key=lambda item: item[:3])
        times: list[int] = []
        pending = sorted((time_ns, number) for number, time_ns in recorded.forward)
        places: dict[int, tuple[int, int]] = {}
        position = 0
        index_of: dict[int, int] = {}
        for time_ns, kind, number, item in order:
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
                elif self._modules:
                    self._modules.pop()
            elif kind == _FREE_ORDER:
                if number not in index_of:
                    continue
                events.append(Event(EventKind.FREE, index_of[number]))
            else:
                assert isinstance(item, Allocation)
                if not item.num_bytes or self._phase == NONE:
                    continue
                index_of[number] = self._storage(item, places, claims.get(number, ()))
                events.append(Event(EventKind.ALLOC, index_of[number]))
            times.append(time_ns)
        self.trace.ops, self.trace.sources = list(self._ops), list(self._lines)
        begin = times[0] if times else 0
        self.trace.times = [time_ns - begin for time_ns in times]
        for time_ns, counters in marks.readings:
            event = bisect.bisect_right(times, time_ns) - 1
            self.trace.samples.append(Sample(event, (time_ns - begin) / 1e9, *counters))

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
        if item.source is not None:
            source = self._lines.setdefault(item.source, len(self._lines))
        forward_event = NONE
        if item.sequence >= 0 and item.sequence in places and not self._modules:
            # A backward operator belongs to the module whose forward it differentiates.
            forward_event, module = places[item.sequence]
            source = self._module_sources[module] if module != NONE else NONE
        # Measured on the CPU, all that the program does is on the device in question.
        device = trace.device if trace.device == CPU or item.device.startswith("cuda") else HOST
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
                self._ops.setdefault(item.op, len(self._ops)),
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
