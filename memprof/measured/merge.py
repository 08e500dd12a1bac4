"""Merge of a measured run's marks and allocations, in order of time, into the Trace.

Allocations on the CPU come from the profiler, which does not see threads that the program starts, so a free may be
missing: a lifetime ends at the latest when the address is reused, or when a watched storage is freed. Allocations on a
GPU come from the allocator's complete history, combined with the profiler's operators.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from memprof.device.cublas import CublasWorkspace
from memprof.measured.history import DEFAULT_POOL, DEFAULT_STREAM, Allocation, History
from memprof.measured.marks import Claim, FreedStorage, Marks
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

# Order of events in the same nanosecond.
_RELEASE_ORDER, _FREE_ORDER, _POOL_ORDER, _MARK_ORDER, _ALLOC_ORDER = range(5)
_FIRST_AWAITED = 1 << 20  # first number of streams that the program does not have


@dataclass(slots=True)
class Recorded:
    """All allocations of one run, in order of time."""

    allocations: list[Allocation] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)  # as `Profile.forward`
    # Private pools, with the time from which the allocator could release their segments.
    released_pools: list[tuple[int, tuple[int, int]]] = field(default_factory=list)


def collect_allocations(
    profile: Profile, history: History | None = None, freed_storages: Iterable[FreedStorage] = ()
) -> Recorded:
    """Return the allocations of a run; `freed_storages` are watched storages in host memory that were freed."""
    allocations = _collect_profiled(profile, freed_storages, excluded_device=None if history is None else "cuda")
    released_pools = []
    if history is not None:
        allocations += history.allocations
        released_pools = history.released_pools
    allocations.sort(key=lambda allocation: allocation.time_ns)
    for allocation in allocations:
        _set_shape_and_dtype(allocation, profile.uses.get(allocation.address, ()), profile.end_ns)
    return Recorded(allocations, profile.forward, released_pools)


def _collect_profiled(
    profile: Profile, freed_storages: Iterable[FreedStorage], excluded_device: str | None
) -> list[Allocation]:
    found: list[Allocation] = []
    alive: dict[tuple[str, int], Allocation] = {}
    # At one time, a free comes before an allocation at the same address.
    changes: list[tuple[int, int, MemoryEvent | FreedStorage]] = [(one.freed_ns, 0, one) for one in freed_storages]
    changes += [
        (one.time_ns, 1, one)
        for one in profile.memory
        if excluded_device is None or not one.device.startswith(excluded_device)
    ]
    for time_ns, _, one in sorted(changes, key=lambda change: change[:2]):
        key = ("cpu", one.address) if isinstance(one, FreedStorage) else (one.device, one.address)
        before = alive.get(key)
        if before is not None and not (isinstance(one, FreedStorage) and before.time_ns > one.seen_ns):
            before.freed_ns = time_ns
            del alive[key]
        if isinstance(one, MemoryEvent) and one.num_bytes >= 0:
            alive[key] = Allocation(time_ns, one.address, one.num_bytes, one.device, one.origin)
            found.append(alive[key])
    return found


def _set_shape_and_dtype(allocation: Allocation, uses: Iterable[TensorInput], end_ns: int) -> None:
    """Set shape and dtype from the first use of all bytes, or else the dtype from the first use."""
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
    """Merge of one run, in one pass in order of time."""

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
        # The driver's stream handle -> number in the trace; the allocator's pool id -> number in the trace.
        self._streams = {DEFAULT_STREAM: 0}
        self._pools = {DEFAULT_POOL: 0}
        self._current = {EventKind.STREAM: 0, EventKind.POOL: 0}
        # Storage -> stream number for the unrecorded streams that the storage's memory waits for.
        self._awaited_streams: dict[int, int] = {}

    def run(self) -> None:
        recorded, marks, events = self._recorded, self._marks, self.trace.events
        claims = self._find_claims()
        times: list[int] = []
        pending = sorted((time_ns, number) for number, time_ns in recorded.forward)
        places: dict[int, tuple[int, int]] = {}
        position = 0
        index_of: dict[int, int] = {}
        for time_ns, kind, number in self._sort_events():
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
            elif kind == _POOL_ORDER:
                pool = self._pools.get(recorded.released_pools[number][1])
                if pool is not None:
                    events.append(Event(EventKind.POOL_FREE, pool))
            elif kind == _ALLOC_ORDER:
                item = recorded.allocations[number]
                if not item.num_bytes or self._phase == NONE:
                    continue
                self._switch_stream_and_pool(item)
                index_of[number] = self._append_storage(item, places, claims.get(number, ()))
                events.append(Event(EventKind.ALLOC, index_of[number]))
            elif number not in index_of:
                continue
            elif kind == _FREE_ORDER:
                self._append_free(recorded.allocations[number], index_of[number])
            else:
                self._append_release(index_of[number])
            times += [time_ns] * (len(events) - len(times))
        self.trace.ops, self.trace.sources = list(self._ops), list(self._lines)
        begin = times[0] if times else 0
        self.trace.times = [time_ns - begin for time_ns in times]
        for time_ns, counters in marks.counter_samples:
            event = bisect.bisect_right(times, time_ns) - 1
            self.trace.samples.append(Sample(event, (time_ns - begin) / 1e9, *counters))

    def _sort_events(self) -> list[tuple[int, int, int]]:
        """Return time, kind and number of all events, in order."""
        recorded, marks = self._recorded, self._marks
        order = [(mark.time_ns, _MARK_ORDER, number) for number, mark in enumerate(marks.marks)]
        order += [(time_ns, _POOL_ORDER, number) for number, (time_ns, _) in enumerate(recorded.released_pools)]
        for number, allocation in enumerate(recorded.allocations):
            order.append((allocation.time_ns, _ALLOC_ORDER, number))
            if allocation.freed_ns is not None:
                order.append((allocation.freed_ns, _FREE_ORDER, number))
            if allocation.released_ns is not None:
                order.append((allocation.released_ns, _RELEASE_ORDER, number))
        return sorted(order)

    def _switch_stream_and_pool(self, item: Allocation) -> None:
        """Append changes of stream and pool, if any, to those of `item`."""
        if not is_gpu(item.device):
            return
        stream = self._streams.setdefault(item.stream, len(self._streams))
        pool = self._pools.setdefault(item.pool, len(self._pools))
        for kind, number in ((EventKind.STREAM, stream), (EventKind.POOL, pool)):
            if self._current[kind] != number:
                self._current[kind] = number
                self.trace.events.append(Event(kind, number))

    def _append_free(self, item: Allocation, storage: int) -> None:
        """Append a free; memory that is not reusable at once waits for a stream of its own."""
        trace = self.trace
        if item.released_ns is not None:
            self._awaited_streams[storage] = _FIRST_AWAITED + len(self._awaited_streams)
            trace.events.append(Event(EventKind.USE, len(trace.uses)))
            trace.uses.append(Use(storage, self._awaited_streams[storage]))
        trace.events.append(Event(EventKind.FREE, storage))

    def _append_release(self, storage: int) -> None:
        trace = self.trace
        trace.events.append(Event(EventKind.WAIT, len(trace.waits)))
        done = StreamEvent(trace.device, self._awaited_streams[storage], len(trace.events))
        trace.waits.append(Wait(by_host=True, done=(done,)))

    def _find_claims(self) -> dict[int, list[Claim]]:
        """Return the claims of each allocation, by the allocation's number."""
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

    def _append_storage(
        self, item: Allocation, places: dict[int, tuple[int, int]], claims: list[Claim] | tuple[()]
    ) -> int:
        trace = self.trace
        index = len(trace.storages)
        forward_event, module = NONE, self._modules[-1] if self._modules else NONE
        is_backward = item.origin.sequence in places and not self._modules
        if is_backward:  # the operator belongs to the module whose forward it differentiates
            forward_event, module = places[item.origin.sequence]
        source = self._module_sources[module] if module != NONE else NONE
        if item.origin.source is not None and not is_backward:
            source = self._lines.setdefault(item.origin.source, len(self._lines))
        # In a run measured on the CPU, all tensors count as on the measured device.
        device = trace.device if is_gpu(item.device) or not is_gpu(trace.device) else HOST
        shape, dtype = item.shape, item.dtype
        if self._modules:  # a tensor that a module makes is not an input
            claims = [claim for claim in claims if claim.owner.role is not Role.INPUT]
        if claims:
            claim = next((one for one in claims if one.owner.name), claims[0])
            trace.owners[index] = claim.owner
            shape, dtype = claim.shape, claim.dtype
            if claim.on_host:
                device = HOST
        if shape is None:
            shape = (item.num_bytes,)
        # Memory that a handle keeps until the end of the process is not an operator's result.
        workspace = None
        if self._cublas is not None and item.dtype is None and item.freed_ns is None and not claims:
            workspace = self._cublas.find_name(item.origin.op, item.num_bytes)
        op = workspace or item.origin.op
        made_by = (self._ops.setdefault(op, len(self._ops)), module, source, self._phase, forward_event)
        hidden = workspace is not None or (not claims and item.is_temporary)
        trace.storages.append(Storage(item.num_bytes, shape, dtype or "uint8", device, *made_by, hidden=hidden))
        return index


def merge(
    trace: Trace, marks: Marks, recorded: Recorded, sources: list[int], cublas: CublasWorkspace | None = None
) -> None:
    """Fill `trace`, which has its device, modules and sources, with events, storages, owners and samples.

    `sources` has for each module of the trace the line of its forward, as an index of the trace's sources; `cublas`
    identifies the workspaces of cuBLAS.
    """
    trace.phases = list(marks.phases)
    _Merge(trace, marks, recorded, sources, cublas).run()
