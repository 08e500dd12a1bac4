"""Merge of a measured run's marks and allocations into a Trace, in order of time.

Allocations on the CPU come from the profiler, which does not see threads that the program starts, so a free may be
missing: a lifetime ends at the latest when the address is reused, or when a watched storage is freed. Allocations on a
GPU come from the allocator's complete history, combined with the profiler's operators.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from memprof.allocator.cublas import CublasWorkspace
from memprof.measured.history import DEFAULT_POOL, DEFAULT_STREAM, Allocation, History
from memprof.measured.marks import FreedStorage, Marks, OwnerMark
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
_FIRST_AWAITED_STREAM = 1 << 20  # index of the first stream that the program does not have


@dataclass(slots=True)
class RunAllocations:
    """All allocations of one run, in order of time."""

    allocations: list[Allocation] = field(default_factory=list)
    forward: list[tuple[int, int]] = field(default_factory=list)  # as `Profile.forward`
    # Private pools, with the time from which the allocator could release their segments.
    released_pools: list[tuple[int, tuple[int, int]]] = field(default_factory=list)


def collect_allocations(
    profile: Profile, history: History | None = None, freed_storages: Iterable[FreedStorage] = ()
) -> RunAllocations:
    """Return the allocations of a run: on a GPU from `history`, on the CPU from `profile` and `freed_storages`."""
    allocations = _collect_profiled(profile, freed_storages, excluded_device=None if history is None else "cuda")
    released_pools = []
    if history is not None:
        allocations += history.allocations
        released_pools = history.released_pools
    allocations.sort(key=lambda allocation: allocation.time_ns)
    for allocation in allocations:
        _set_shape_and_dtype(allocation, profile.uses.get(allocation.address, ()), profile.end_ns)
    return RunAllocations(allocations, profile.forward, released_pools)


def _collect_profiled(
    profile: Profile, freed_storages: Iterable[FreedStorage], excluded_device: str | None
) -> list[Allocation]:
    allocations: list[Allocation] = []
    live_by_key: dict[tuple[str, int], Allocation] = {}
    # At one time, a free comes before an allocation at the same address.
    changes: list[tuple[int, int, MemoryEvent | FreedStorage]] = [(c.freed_ns, 0, c) for c in freed_storages]
    changes += [
        (change.time_ns, 1, change)
        for change in profile.memory
        if excluded_device is None or not change.device.startswith(excluded_device)
    ]
    for time_ns, _, change in sorted(changes, key=lambda item: item[:2]):
        key = ("cpu", change.address) if isinstance(change, FreedStorage) else (change.device, change.address)
        previous = live_by_key.get(key)
        if previous is not None and not (isinstance(change, FreedStorage) and previous.time_ns > change.seen_ns):
            previous.freed_ns = time_ns
            del live_by_key[key]
        if isinstance(change, MemoryEvent) and change.num_bytes >= 0:
            live_by_key[key] = Allocation(time_ns, change.address, change.num_bytes, change.device, change.origin)
            allocations.append(live_by_key[key])
    return allocations


def _set_shape_and_dtype(allocation: Allocation, uses: Iterable[TensorInput], end_ns: int) -> None:
    """Set shape and dtype of `allocation` from its first use with all bytes, or else the dtype from its first use."""
    freed_ns = end_ns if allocation.freed_ns is None else allocation.freed_ns
    first_use = None
    for use in uses:
        if allocation.time_ns <= use.time_ns <= freed_ns:
            if use.num_bytes == allocation.num_bytes:
                allocation.shape, allocation.dtype = use.shape, use.dtype
                return
            first_use = first_use or use
    if first_use is not None:
        allocation.dtype = first_use.dtype


class _Merger:
    """Merger of one run's marks and allocations, in one pass in order of time."""

    def __init__(
        self, trace: Trace, marks: Marks, recorded: RunAllocations, sources: list[int], cublas: CublasWorkspace | None
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
        # The driver's stream handle -> index in the trace; the allocator's pool id -> index in the trace.
        self._streams = {DEFAULT_STREAM: 0}
        self._pools = {DEFAULT_POOL: 0}
        self._current_by_kind = {EventKind.STREAM: 0, EventKind.POOL: 0}
        # Storage -> stream index for the unrecorded streams that the storage's memory waits for.
        self._awaited_streams: dict[int, int] = {}

    def run(self) -> None:
        recorded, marks, events = self._recorded, self._marks, self.trace.events
        owner_marks = self._find_owner_marks()
        times: list[int] = []
        pending = sorted((time_ns, sequence) for sequence, time_ns in recorded.forward)
        forward_positions: dict[int, tuple[int, int]] = {}
        position = 0
        storages: dict[int, int] = {}
        for time_ns, kind, index in self._sort_events():
            while position < len(pending) and pending[position][0] <= time_ns:
                forward_positions[pending[position][1]] = (len(events), self._modules[-1] if self._modules else NONE)
                position += 1
            if kind == _MARK_ORDER:
                mark = marks.marks[index]
                events.append(Event(mark.kind, mark.ref))
                if mark.kind is EventKind.PHASE:
                    self._phase = mark.ref
                elif mark.kind is EventKind.ENTER:
                    self._modules.append(mark.ref)
                elif mark.kind is EventKind.EXIT and self._modules:
                    self._modules.pop()
            elif kind == _POOL_ORDER:
                pool = self._pools.get(recorded.released_pools[index][1])
                if pool is not None:
                    events.append(Event(EventKind.POOL_FREE, pool))
            elif kind == _ALLOC_ORDER:
                allocation = recorded.allocations[index]
                if not allocation.num_bytes or self._phase == NONE:
                    continue
                self._switch_stream_and_pool(allocation)
                storages[index] = self._append_storage(allocation, forward_positions, owner_marks.get(index, ()))
                events.append(Event(EventKind.ALLOC, storages[index]))
            elif index not in storages:
                continue
            elif kind == _FREE_ORDER:
                self._append_free(recorded.allocations[index], storages[index])
            else:
                self._append_release(storages[index])
            times += [time_ns] * (len(events) - len(times))
        self.trace.ops, self.trace.sources = list(self._ops), list(self._lines)
        begin_ns = times[0] if times else 0
        self.trace.times = [time_ns - begin_ns for time_ns in times]
        for time_ns, counters in marks.counter_samples:
            event_index = bisect.bisect_right(times, time_ns) - 1
            self.trace.samples.append(Sample(event_index, (time_ns - begin_ns) / 1e9, *counters))

    def _sort_events(self) -> list[tuple[int, int, int]]:
        """Return (time, kind, index of the mark, allocation or pool) of all events, in order."""
        recorded, marks = self._recorded, self._marks
        events = [(mark.time_ns, _MARK_ORDER, index) for index, mark in enumerate(marks.marks)]
        events += [(time_ns, _POOL_ORDER, index) for index, (time_ns, _) in enumerate(recorded.released_pools)]
        for index, allocation in enumerate(recorded.allocations):
            events.append((allocation.time_ns, _ALLOC_ORDER, index))
            if allocation.freed_ns is not None:
                events.append((allocation.freed_ns, _FREE_ORDER, index))
            if allocation.released_ns is not None:
                events.append((allocation.released_ns, _RELEASE_ORDER, index))
        return sorted(events)

    def _switch_stream_and_pool(self, allocation: Allocation) -> None:
        """Append events that select the stream and pool of `allocation`, if they change."""
        if not is_gpu(allocation.device):
            return
        stream = self._streams.setdefault(allocation.stream, len(self._streams))
        pool = self._pools.setdefault(allocation.pool, len(self._pools))
        for kind, index in ((EventKind.STREAM, stream), (EventKind.POOL, pool)):
            if self._current_by_kind[kind] != index:
                self._current_by_kind[kind] = index
                self.trace.events.append(Event(kind, index))

    def _append_free(self, allocation: Allocation, storage: int) -> None:
        """Append the free of `storage`; memory that is not reusable at once waits for an artificial stream."""
        trace = self.trace
        if allocation.released_ns is not None:
            self._awaited_streams[storage] = _FIRST_AWAITED_STREAM + len(self._awaited_streams)
            trace.events.append(Event(EventKind.USE, len(trace.uses)))
            trace.uses.append(Use(storage, self._awaited_streams[storage]))
        trace.events.append(Event(EventKind.FREE, storage))

    def _append_release(self, storage: int) -> None:
        trace = self.trace
        trace.events.append(Event(EventKind.WAIT, len(trace.waits)))
        stream_event = StreamEvent(trace.device, self._awaited_streams[storage], len(trace.events))
        trace.waits.append(Wait(by_host=True, done=(stream_event,)))

    def _find_owner_marks(self) -> dict[int, list[OwnerMark]]:
        """Return the owner marks of each allocation, by the allocation's index."""
        indices_by_address: dict[int, list[int]] = defaultdict(list)
        for index, allocation in enumerate(self._recorded.allocations):
            indices_by_address[allocation.address].append(index)
        marks_by_allocation: dict[int, list[OwnerMark]] = defaultdict(list)
        for mark in self._marks.owner_marks:
            for index in reversed(indices_by_address.get(mark.address, ())):
                item = self._recorded.allocations[index]
                if item.time_ns <= mark.time_ns and (item.freed_ns is None or item.freed_ns > mark.time_ns):
                    marks_by_allocation[index].append(mark)
                    break
        return marks_by_allocation

    def _append_storage(
        self, allocation: Allocation, forward_positions: dict[int, tuple[int, int]], marks: list[OwnerMark] | tuple[()]
    ) -> int:
        trace = self.trace
        index = len(trace.storages)
        forward_event, module = NONE, self._modules[-1] if self._modules else NONE
        is_backward = allocation.origin.sequence in forward_positions and not self._modules
        if is_backward:  # the operator belongs to the module whose forward it differentiates
            forward_event, module = forward_positions[allocation.origin.sequence]
        source = self._module_sources[module] if module != NONE else NONE
        if allocation.origin.source is not None and not is_backward:
            source = self._lines.setdefault(allocation.origin.source, len(self._lines))
        # In a run measured on the CPU, all tensors count as on the measured device.
        device = trace.device if is_gpu(allocation.device) or not is_gpu(trace.device) else HOST
        shape, dtype = allocation.shape, allocation.dtype
        if self._modules:  # a tensor that a module makes is not an input
            marks = [mark for mark in marks if mark.owner.role is not Role.INPUT]
        if marks:
            owner_mark = next((mark for mark in marks if mark.owner.name), marks[0])
            trace.owners[index] = owner_mark.owner
            shape, dtype = owner_mark.shape, owner_mark.dtype
            if owner_mark.on_host:
                device = HOST
        if shape is None:
            shape = (allocation.num_bytes,)
        # Memory that a handle keeps until the end of the process is not an operator's result.
        workspace = None
        if self._cublas is not None and allocation.dtype is None and allocation.freed_ns is None and not marks:
            workspace = self._cublas.find_name(allocation.origin.op, allocation.num_bytes)
        op = workspace or allocation.origin.op
        origin = (self._ops.setdefault(op, len(self._ops)), module, source, self._phase, forward_event)
        is_hidden = workspace is not None or (not marks and allocation.is_temporary)
        trace.storages.append(Storage(allocation.num_bytes, shape, dtype or "uint8", device, *origin, hidden=is_hidden))
        return index


def merge(
    trace: Trace, marks: Marks, recorded: RunAllocations, sources: list[int], cublas: CublasWorkspace | None = None
) -> None:
    """Fill `trace`, which has its device, modules and sources, with events, storages, owners and samples.

    `sources` has for each module of the trace the line of its forward, as an index of the trace's sources; `cublas`
    identifies the workspaces of cuBLAS.
    """
    trace.phases = list(marks.phases)
    _Merger(trace, marks, recorded, sources, cublas).run()
