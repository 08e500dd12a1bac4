"""History of the GPU's allocator in a run: every allocation and free of all threads, in the allocator's own order.

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

from memprof.measured.operators import OUTSIDE, MemoryEvent, OperatorOrigin
from memprof.trace.snapshot import Action, BlockState

DEFAULT_STREAM = 0
DEFAULT_POOL = (0, 0)  # the allocator's id; other pools are private to CUDA graphs and memory pools
_ALLOC_AND_FREE = (Action.ALLOC, Action.FREE_REQUESTED)
# Tolerance between the profiler's and the allocator's clocks, which are converted to time of day separately: 0.1 ms was
# observed on a busy machine. An entry that was not recorded is missing for longer.
_CLOCK_TOLERANCE_NS = 2_000_000


@dataclass(slots=True)
class Allocation:
    """One allocation, and its free if the memory was freed."""

    time_ns: int
    address: int
    num_bytes: int
    device: str
    origin: OperatorOrigin = OUTSIDE
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
        """Return whether the allocating operator freed the memory before its end: scratch memory without a tensor."""
        return self.freed_ns is not None and 0 < self.freed_ns <= self.origin.op_end_ns


@dataclass(slots=True)
class History:
    """Recorded entries of one GPU."""

    device: str
    allocations: list[Allocation] = field(default_factory=list)  # in the allocator's order
    released_pools: list[tuple[int, tuple[int, int]]] = field(
        default_factory=list
    )  # as `merge.Recorded.released_pools`
    # (time, requested bytes minus freed bytes since the begin) after each allocation and free.
    # Negative after frees of memory allocated before the run.
    requested_bytes: list[tuple[int, int]] = field(default_factory=list)
    num_entries: int = 0  # entries in the recording
    num_unmatched: int = 0  # the profiler's allocations and frees that the allocator did not record

    def count_missing_bytes(self, blocks: Mapping[int, int], initial_blocks: Mapping[int, int]) -> int:
        """Return the bytes that differ between `blocks`, allocated when the run ended, and the live allocations of the
        history. `initial_blocks`, allocated before the run, are ignored."""
        alive = {one.address: one.num_bytes for one in self.allocations if one.freed_ns is None}
        return sum(
            max(alive.get(address, 0), blocks.get(address, 0))
            for address in alive.keys() | blocks.keys()
            if alive.get(address) != blocks.get(address) and initial_blocks.get(address) != blocks.get(address)
        )


class CounterSample(NamedTuple):
    """torch's counter of requested bytes, read between two times."""

    from_ns: int
    to_ns: int
    requested_bytes: int


class CounterGap(NamedTuple):
    """Disagreement between torch's counters and the recorded history."""

    time_ns: int
    counted_bytes: int  # requested and not freed since the run's beginning, by torch's counters
    recorded_bytes: int  # requested minus freed bytes by the recorded history


def read_history(snapshot: Mapping[str, Any], gpu: int, profiler_events: Sequence[MemoryEvent]) -> History:
    """Return the history of GPU `gpu` in a torch.cuda snapshot; `profiler_events` are the profiler's by time."""
    recorded = snapshot["device_traces"][gpu]
    entries = [entry for entry in recorded if "addr" in entry]
    pools = _Pools(snapshot, gpu)
    times, origins, num_unmatched = _match_entries(entries, profiler_events)
    found = History(f"cuda:{gpu}", num_entries=len(recorded), num_unmatched=num_unmatched)
    alive: dict[int, Allocation] = {}
    freed: dict[int, tuple[int, Allocation]] = {}
    private: set[tuple[int, int]] = set()
    held = 0
    for number, (entry, time_ns) in enumerate(zip(entries, times, strict=True)):
        action, address, size = entry["action"], entry["addr"], entry["size"]
        pool = pools.find_pool(entry)
        if action == Action.ALLOC:
            origin = origins.get(number, OUTSIDE)
            allocation = Allocation(time_ns, address, size, found.device, origin, entry["stream"], pool)
            before = alive.pop(address, None)
            if before is not None:
                before.freed_ns = time_ns
                held -= before.num_bytes
            alive[address] = allocation
            found.allocations.append(allocation)
            held += size
        elif action == Action.FREE_REQUESTED:
            freed_allocation = alive.pop(address, None)
            if freed_allocation is not None:
                freed_allocation.freed_ns = time_ns
                freed[address] = (number, freed_allocation)
            held -= size if freed_allocation is None else freed_allocation.num_bytes
        elif action == Action.FREE_COMPLETED:
            requested, freed_allocation = freed.pop(address, (number, None))
            if freed_allocation is not None and number > requested + 1:
                freed_allocation.released_ns = time_ns
        elif action == Action.SEGMENT_FREE and pool != DEFAULT_POOL and pool not in private:
            private.add(pool)
            found.released_pools.append((time_ns, pool))
        if action in _ALLOC_AND_FREE:
            found.requested_bytes.append((time_ns, held))
    return found


def find_largest_gap(history: History, samples: Iterable[CounterSample], initial_bytes: int) -> CounterGap | None:
    """Return the largest gap between counters and history, None if they agree at every reading of torch's
    `requested_bytes`, which had the value `initial_bytes` when the run began."""
    times = [time_ns for time_ns, _ in history.requested_bytes]
    found, largest = None, 0
    for from_ns, to_ns, requested in samples:
        counted = requested - initial_bytes
        # Another thread may allocate while the counters are read: any value in that interval is right.
        begin, end = (
            bisect.bisect_left(times, from_ns - _CLOCK_TOLERANCE_NS),
            bisect.bisect_right(times, to_ns + _CLOCK_TOLERANCE_NS),
        )
        recorded = [
            history.requested_bytes[begin - 1][1] if begin else 0,
            *(held for _, held in history.requested_bytes[begin:end]),
        ]
        nearest = min(recorded, key=lambda held: abs(held - counted))
        if abs(nearest - counted) > largest:
            found, largest = CounterGap(to_ns, counted, nearest), abs(nearest - counted)
    return found


def get_live_blocks(snapshot: Mapping[str, Any], gpu: int) -> dict[int, int]:
    """Return requested bytes by address of the blocks allocated in a snapshot."""
    return {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment["device"] == gpu
        for block in segment["blocks"]
        if block["state"] == BlockState.ALLOCATED
    }


class _Pools:
    """Pools of the entries' memory; newer torch releases have the pool in entries, older releases only in segments."""

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
        at = bisect.bisect_right(self._segments, entry["addr"], key=lambda segment: segment[0]) - 1
        if at >= 0 and entry["addr"] < self._segments[at][1]:
            return self._segments[at][2]
        return DEFAULT_POOL


def _match_entries(
    entries: Sequence[Any], profiler_events: Sequence[MemoryEvent]
) -> tuple[list[int], dict[int, OperatorOrigin], int]:
    """Return the time of each entry in nanoseconds, the operator of each entry that the profiler saw, and the number of
    the profiler's events without an entry."""
    entry_numbers: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if entry["action"] in _ALLOC_AND_FREE:
            entry_numbers[entry["addr"], entry["action"] == Action.ALLOC].append(number)
    events_by_key: dict[tuple[int, bool], list[MemoryEvent]] = defaultdict(list)
    for one in profiler_events:
        events_by_key[one.address, one.num_bytes >= 0].append(one)
    entry_times = [entry["time_us"] * 1000 for entry in entries]
    clock_offsets = [
        one.time_ns - entry_times[number]
        for key, events in events_by_key.items()
        if len(events) == len(entry_numbers.get(key, ()))
        for number, one in zip(entry_numbers[key], events, strict=True)
    ]
    skew = int(median(clock_offsets)) if clock_offsets else 0
    times = [time_ns + skew for time_ns in entry_times]
    origins: dict[int, OperatorOrigin] = {}
    num_unmatched = 0
    for key, events in events_by_key.items():
        numbers = entry_numbers.get(key, [])
        num_unmatched += max(len(events) - len(numbers), 0)
        for number, one in _pair_nearest(events, numbers, times):
            origins[number], times[number] = one.origin, one.time_ns
    # The allocator's order is right; times are made strictly increasing.
    for number in range(1, len(times)):
        times[number] = max(times[number], times[number - 1] + 1)
    return times, origins, num_unmatched


def _pair_nearest(events: list[MemoryEvent], numbers: list[int], times: list[int]) -> list[tuple[int, MemoryEvent]]:
    """Pair the profiler's events at one address, in order, with the entries nearest in time."""
    pairs, at = [], 0
    for position, one in enumerate(events):
        last = len(numbers) - (len(events) - position)  # each later event needs an entry
        while at < last and abs(times[numbers[at + 1]] - one.time_ns) <= abs(times[numbers[at]] - one.time_ns):
            at += 1
        if at >= len(numbers):
            break
        pairs.append((numbers[at], one))
        at += 1
    return pairs
