"""Marks and allocations of a measured run, put in order of time: the Trace.

Allocations on the CPU are the profiler's. It is told of nothing in threads that the program starts, so that a free may
be missing: a life ends at the latest when its address is handed out again, or when a storage that was watched is gone.
Those on a GPU are the allocator's own history, which misses nothing, with the profiler's operators laid over it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from memprof.device.cublas import CublasWorkspace
from memprof.measured.history import DEFAULT_POOL, DEFAULT_STREAM, Allocation, History
from memprof.measured.marks import Claim, Gone, Marks
from memprof.measured.operators import MemoryEvent, Profile, TensorInput
from memprof.trace.events import (
    HOST,
    NONE,
    Event,
    EventKind,
    Role,
    Sample,
    Storage,
    StreamEvent,
    Trace,
    Use,
    Wait,
    is_gpu,
)

# Of what happened in the same nanosecond.
_RELEASE_ORDER, _FREE_ORDER, _RETIRE_ORDER, _MARK_ORDER, _ALLOC_ORDER = range(5)
_FIRST_AWAITED = 1 << 20  # numbers of streams from here on are none of the program's


@dataclass(slots=True)
class Recorded:
    """All of one run, in order of time."""

    allocations: list[Allocation] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)  # as `Profile.forward`
    # Private pools, with the time from which the allocator could release their segments.
    retired: list[tuple[int, tuple[int, int]]] = field(default_factory=list)


def collect_allocations(profile: Profile, history: History | None = None, gone: Iterable[Gone] = ()) -> Recorded:
    """Make the allocations of a run; `gone` are storages in host memory that were watched."""
    allocations = _of_profile(profile, gone, without=None if history is None else "cuda")
    retired = []
    if history is not None:
        allocations += history.allocations
        retired = history.retired
    allocations.sort(key=lambda allocation: allocation.time_ns)
    for allocation in allocations:
        _describe(allocation, profile.uses.get(allocation.address, ()), profile.end_ns)
    return Recorded(allocations, profile.forward, retired)


def _of_profile(profile: Profile, gone: Iterable[Gone], without: str | None) -> list[Allocation]:
    found: list[Allocation] = []
    alive: dict[tuple[str, int], Allocation] = {}
    # At one time, what is gone comes before what takes its address.
    steps: list[tuple[int, int, MemoryEvent | Gone]] = [(one.gone_ns, 0, one) for one in gone]
    steps += [(one.time_ns, 1, one) for one in profile.memory if without is None or not one.device.startswith(without)]
    for time_ns, _, one in sorted(steps, key=lambda step: step[:2]):
        key = ("cpu", one.address) if isinstance(one, Gone) else (one.device, one.address)
        before = alive.get(key)
        if before is not None and not (isinstance(one, Gone) and before.time_ns > one.seen_ns):
            before.freed_ns = time_ns
            del alive[key]
        if isinstance(one, MemoryEvent) and one.num_bytes >= 0:
            alive[key] = Allocation(time_ns, one.address, one.num_bytes, one.device, one.origin)
            found.append(alive[key])
    return found


def _describe(allocation: Allocation, uses: Iterable[TensorInput], end_ns: int) -> None:
    """Shape and dtype, from the first use of the memory that covers it, or else from the first."""
    end = end_ns if allocation.freed_ns is None else allocation.freed_ns
    first = None
    for use in uses:
        if allocation.time_ns <= use.time_ns <= end:
            if use.num_bytes == allocation.num_bytes:
                allocation.shape, allocation.dtype = use.shape, use.dtype
                return
            first = first or use
    if first is not None:
        allocation.dtype = first.dtype


class _Merge:
    """Walks the run once, in order of time."""

    def __init__(
        self, trace: Trace, marks: Marks, recorded: Recorded, sources: list[int], cublas: CublasWorkspace | None
    ) -> None:
        self.trace = trace
        self._cublas = cublas
        self._marks = marks
        self._recorded = recorded
        self._module_sources = sources  # line of each module's forward, as an index of the trace's sources
        self._ops: dict[str, int] = {}
        self._lines = {line: index for index, line in enumerate(trace.sources)}
        self._phase = NONE
        self._modules: list[int] = []
        # The driver's name of a stream -> its number in the trace; pools: the allocator's.
        self._streams = {DEFAULT_STREAM: 0}
        self._pools = {DEFAULT_POOL: 0}
        self._current = {EventKind.STREAM: 0, EventKind.POOL: 0}
        # Storage -> the stream that stands for whatever its memory waits for, which no recording names.
        self._awaited: dict[int, int] = {}

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
                self._switch_stream_and_pool(item)
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

    def _switch_stream_and_pool(self, item: Allocation) -> None:
        """Note that the next allocations are on the stream and from the pool of `item`."""
        if not is_gpu(item.device):
            return
        stream = self._streams.setdefault(item.stream, len(self._streams))
        pool = self._pools.setdefault(item.pool, len(self._pools))
        for kind, number in ((EventKind.STREAM, stream), (EventKind.POOL, pool)):
            if self._current[kind] != number:
                self._current[kind] = number
                self.trace.events.append(Event(kind, number))

    def _free(self, item: Allocation, storage: int) -> None:
        """Free it; if its memory is not free at once, a stream of its own is what it waits for."""
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
                item = self._recorded.allocations[number]
                if item.time_ns <= claim.time_ns and (item.freed_ns is None or item.freed_ns > claim.time_ns):
                    found[number].append(claim)
                    break
        return found

    def _storage(self, item: Allocation, places: dict[int, tuple[int, int]], claims: list[Claim] | tuple[()]) -> int:
        trace = self.trace
        index = len(trace.storages)
        module = self._modules[-1] if self._modules else NONE
        source = self._module_sources[module] if module != NONE else NONE
        if item.origin.source is not None:
            source = self._lines.setdefault(item.origin.source, len(self._lines))
        forward_event = NONE
        if item.origin.sequence in places and not self._modules:
            # A backward operator belongs to the module whose forward it differentiates.
            forward_event, module = places[item.origin.sequence]
            source = self._module_sources[module] if module != NONE else NONE
        # Measured on the CPU, all that the program does is on the device in question.
        device = trace.device if is_gpu(item.device) or not is_gpu(trace.device) else HOST
        shape, dtype = item.shape, item.dtype
        if self._modules:  # what a module makes and another model is given is no input
            claims = [claim for claim in claims if claim.owner.role is not Role.INPUT]
        if claims:
            claim = next((one for one in claims if one.owner.name), claims[0])
            trace.owners[index] = claim.owner
            shape, dtype = claim.shape, claim.dtype
            if claim.on_host:
                device = HOST
        if shape is None:
            shape = (item.num_bytes,)
        # What a handle keeps for good is no operator's result, of which something would become.
        workspace = None
        if self._cublas is not None and item.dtype is None and item.freed_ns is None and not claims:
            workspace = self._cublas.name(item.origin.op, item.num_bytes)
        op = workspace or item.origin.op
        made_by = (self._ops.setdefault(op, len(self._ops)), module, source, self._phase, forward_event)
        hidden = workspace is not None or (not claims and item.is_temporary)
        trace.storages.append(Storage(item.num_bytes, shape, dtype or "uint8", device, *made_by, hidden=hidden))
        return index


def merge(
    trace: Trace, marks: Marks, recorded: Recorded, sources: list[int], cublas: CublasWorkspace | None = None
) -> None:
    """Fill `trace`, which has its device, modules and sources, with events, storages, owners and samples.

    `sources` has for each module of the trace the line of its forward, as an index of the trace's sources; `cublas` is
    by what the workspaces of cuBLAS are known.
    """
    trace.phases = list(marks.phases)
    _Merge(trace, marks, recorded, sources, cublas).run()
