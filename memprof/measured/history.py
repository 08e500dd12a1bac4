"""History of the GPU's allocator in a run: every allocation and free of all threads, in the allocator's order.

Entries (`device_traces` of torch.cuda.memory._snapshot) have address, requested bytes, stream, pool and a time in
microseconds. Entries that the profiler also saw get the profiler's times, in nanoseconds, and its operators.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from memprof.measured.operators import OUTSIDE_OPERATORS, MemoryEvent, OperatorOrigin
from memprof.trace.snapshot import Action, BlockState

DEFAULT_STREAM = 0
DEFAULT_POOL = (0, 0)  # the allocator's id; other pools are private to CUDA graphs and memory pools
_ALLOC_AND_FREE = (Action.ALLOC, Action.FREE_REQUESTED)
# Tolerance between the profiler's and the allocator's clocks, which are converted to time of day separately: 0.1 ms was
# observed on a busy machine. An entry that was not recorded is missing for longer; where the profiler is later by more,
# the thread paused between the two.
_CLOCK_TOLERANCE_NS = 2_000_000


@dataclass(slots=True)
class Allocation:
    """One allocation, with the time of its free if the memory was freed."""

    time_ns: int
    address: int
    num_bytes: int
    device: str
    origin: OperatorOrigin = OUTSIDE_OPERATORS
    stream: int = DEFAULT_STREAM  # the driver's handle
    pool: tuple[int, int] = DEFAULT_POOL
    freed_ns: int | None = None
    # Time at which the memory became reusable, where later than the free: other streams were still using the memory.
    released_ns: int | None = None
    # Shape and dtype of the first use as a tensor; None without such a use.
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def is_temporary(self) -> bool:
        """Return whether the operator that allocated the memory also freed it: scratch memory without a tensor."""
        return self.freed_ns is not None and 0 < self.freed_ns <= self.origin.op_end_ns


@dataclass(slots=True)
class History:
    """Allocations and frees that the allocator of one GPU recorded."""

    device: str
    allocations: list[Allocation] = field(default_factory=list)  # in the allocator's order
    released_pools: list[tuple[int, tuple[int, int]]] = field(
        default_factory=list
    )  # as `merge.RunAllocations.released_pools`
    # (time, requested bytes minus freed bytes since the begin) after each allocation and free.
    # Negative after frees of memory allocated before the run.
    requested_bytes: list[tuple[int, int]] = field(default_factory=list)
    num_entries: int = 0  # entries in the recording
    num_unmatched: int = 0  # the profiler's allocations and frees that the allocator did not record

    def count_missing_bytes(self, blocks: Mapping[int, int], initial_blocks: Mapping[int, int]) -> int:
        """Return the bytes that differ between `blocks`, bytes by address when the run ended, and the live allocations
        of the history. `initial_blocks`, allocated before the run, are ignored."""
        live_blocks = {item.address: item.num_bytes for item in self.allocations if item.freed_ns is None}
        return sum(
            max(live_blocks.get(address, 0), blocks.get(address, 0))
            for address in live_blocks.keys() | blocks.keys()
            if live_blocks.get(address) != blocks.get(address) and initial_blocks.get(address) != blocks.get(address)
        )


class CounterSample(NamedTuple):
    """Value of torch's counter of requested bytes, read between two times."""

    begin_ns: int
    end_ns: int
    requested_bytes: int


class CounterGap(NamedTuple):
    """Difference between torch's counter of requested bytes and the recorded history, at one time."""

    time_ns: int
    counted_bytes: int  # requested and not freed since the run's beginning, by torch's counters
    recorded_bytes: int  # requested minus freed bytes by the recorded history


def read_history(snapshot: Mapping[str, Any], gpu: int, profiler_events: Sequence[MemoryEvent]) -> History:
    """Return the history of GPU `gpu` in a torch.cuda snapshot; `profiler_events` are in order of time."""
    all_entries = snapshot["device_traces"][gpu]
    entries = [entry for entry in all_entries if "addr" in entry]
    pools = _Pools(snapshot, gpu)
    times, origins, num_unmatched = _match_entries(entries, profiler_events)
    history = History(f"cuda:{gpu}", num_entries=len(all_entries), num_unmatched=num_unmatched)
    live_by_address: dict[int, Allocation] = {}
    freed_by_address: dict[int, tuple[int, Allocation]] = {}
    released_pools: set[tuple[int, int]] = set()
    requested_bytes = 0
    for index, (entry, time_ns) in enumerate(zip(entries, times, strict=True)):
        action, address, size = entry["action"], entry["addr"], entry["size"]
        pool = pools.find_pool(entry)
        if action == Action.ALLOC:
            origin = origins.get(index, OUTSIDE_OPERATORS)
            allocation = Allocation(time_ns, address, size, history.device, origin, entry["stream"], pool)
            previous = live_by_address.pop(address, None)
            if previous is not None:
                previous.freed_ns = time_ns
                requested_bytes -= previous.num_bytes
            live_by_address[address] = allocation
            history.allocations.append(allocation)
            requested_bytes += size
        elif action == Action.FREE_REQUESTED:
            freed_allocation = live_by_address.pop(address, None)
            if freed_allocation is not None:
                freed_allocation.freed_ns = time_ns
                freed_by_address[address] = (index, freed_allocation)
            requested_bytes -= size if freed_allocation is None else freed_allocation.num_bytes
        elif action == Action.FREE_COMPLETED:
            free_index, freed_allocation = freed_by_address.pop(address, (index, None))
            if freed_allocation is not None and index > free_index + 1:
                freed_allocation.released_ns = time_ns
        elif action == Action.SEGMENT_FREE and pool != DEFAULT_POOL and pool not in released_pools:
            released_pools.add(pool)
            history.released_pools.append((time_ns, pool))
        if action in _ALLOC_AND_FREE:
            history.requested_bytes.append((time_ns, requested_bytes))
    return history


def find_largest_gap(history: History, samples: Iterable[CounterSample], initial_bytes: int) -> CounterGap | None:
    """Return the largest gap between `samples` of torch's `requested_bytes`, which was `initial_bytes` when the run
    began, and `history`; None if they always agree."""
    times = [time_ns for time_ns, _ in history.requested_bytes]
    largest_gap, largest_bytes = None, 0
    for begin_ns, end_ns, requested_bytes in samples:
        counted = requested_bytes - initial_bytes
        # Another thread may allocate while the counters are read: any value in that interval is right.
        first, last = (
            bisect.bisect_left(times, begin_ns - _CLOCK_TOLERANCE_NS),
            bisect.bisect_right(times, end_ns + _CLOCK_TOLERANCE_NS),
        )
        recorded_values = [
            history.requested_bytes[first - 1][1] if first else 0,
            *(num_bytes for _, num_bytes in history.requested_bytes[first:last]),
        ]
        nearest = min(recorded_values, key=lambda num_bytes: abs(num_bytes - counted))
        if abs(nearest - counted) > largest_bytes:
            largest_gap, largest_bytes = CounterGap(end_ns, counted, nearest), abs(nearest - counted)
    return largest_gap


def get_live_blocks(snapshot: Mapping[str, Any], gpu: int) -> dict[int, int]:
    """Return the requested bytes, by address, of the allocated blocks of GPU `gpu` in a torch.cuda snapshot."""
    return {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment["device"] == gpu
        for block in segment["blocks"]
        if block["state"] == BlockState.ALLOCATED
    }


class _Pools:
    """Lookup of the memory pool of an entry, from the entry or, in older torch releases, from its segment."""

    def __init__(self, snapshot: Mapping[str, Any], gpu: int) -> None:
        segments = [segment for segment in snapshot["segments"] if segment["device"] == gpu]
        self._segments = sorted(
            (segment["address"], segment["address"] + segment["total_size"], tuple(segment["segment_pool_id"]))
            for segment in segments
            if "segment_pool_id" in segment
        )

    def find_pool(self, entry: Mapping[str, Any]) -> tuple[int, int]:
        if "pool_id" in entry:
            return tuple(entry["pool_id"])
        index = bisect.bisect_right(self._segments, entry["addr"], key=lambda segment: segment[0]) - 1
        if index >= 0 and entry["addr"] < self._segments[index][1]:
            return self._segments[index][2]
        return DEFAULT_POOL


def _match_entries(
    entries: Sequence[Any], profiler_events: Sequence[MemoryEvent]
) -> tuple[list[int], dict[int, OperatorOrigin], int]:
    """Return the time of each entry (ns), the operator by index of entries that the profiler recorded too, and the
    number of profiler events without an entry."""
    entry_indices_by_key: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if entry["action"] in _ALLOC_AND_FREE:
            entry_indices_by_key[entry["addr"], entry["action"] == Action.ALLOC].append(index)
    events_by_key: dict[tuple[int, bool], list[MemoryEvent]] = defaultdict(list)
    for event in profiler_events:
        events_by_key[event.address, event.num_bytes >= 0].append(event)
    entry_times = [entry["time_us"] * 1000 for entry in entries]
    clock_offsets = [
        event.time_ns - entry_times[index]
        for key, events in events_by_key.items()
        if len(events) == len(entry_indices_by_key.get(key, ()))
        for index, event in zip(entry_indices_by_key[key], events, strict=True)
    ]
    offset = int(median(clock_offsets)) if clock_offsets else 0
    offset = max(-_CLOCK_TOLERANCE_NS, min(offset, _CLOCK_TOLERANCE_NS))
    times = [time_ns + offset for time_ns in entry_times]
    origins: dict[int, OperatorOrigin] = {}
    num_unmatched = 0
    for key, events in events_by_key.items():
        entry_indices = entry_indices_by_key.get(key, [])
        num_unmatched += max(len(events) - len(entry_indices), 0)
        for index, event in _pair_by_time(events, entry_indices, times):
            origins[index], times[index] = event.origin, event.time_ns
    # The allocator's order is right; times are made strictly increasing.
    for index in range(1, len(times)):
        times[index] = max(times[index], times[index - 1] + 1)
    return times, origins, num_unmatched


def _pair_by_time(events: list[MemoryEvent], indices: list[int], times: list[int]) -> list[tuple[int, MemoryEvent]]:
    """Return pairs (entry index, event) of `events` at one address, in order, with the entries nearest in time."""
    pairs, i = [], 0
    for event_index, event in enumerate(events):
        last = len(indices) - (len(events) - event_index)  # each later event needs an entry
        while i < last and abs(times[indices[i + 1]] - event.time_ns) <= abs(times[indices[i]] - event.time_ns):
            i += 1
        if i >= len(indices):
            break
        pairs.append((indices[i], event))
        i += 1
    return pairs
