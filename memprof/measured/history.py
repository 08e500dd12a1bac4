"""History of the GPU's allocator in a run: every allocation and free, whoever made it, in the allocator's own order.

Its entries (`device_traces` of torch.cuda.memory._snapshot) name address, bytes requested, stream and pool, and a time
in microseconds. The profiler saw those inside operators, too: these get its times, in nanoseconds, and its operators.
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
DEFAULT_POOL = (0, 0)  # as the allocator calls it; others are private to CUDA graphs and memory pools
_TAKEN_AND_FREED = (Action.ALLOC, Action.FREE_REQUESTED)
# Between the clocks, which count the processor's ticks and are brought to the time of day each by itself: 0.1 ms were
# seen on a busy machine. What is not recorded is missing for longer.
_SLACK_NS = 2_000_000


@dataclass(slots=True)
class Allocation:
    """One allocation, and its free if there was one."""

    time_ns: int
    address: int
    num_bytes: int
    device: str
    origin: OperatorOrigin = OUTSIDE
    stream: int = DEFAULT_STREAM  # as the driver calls it
    pool: tuple[int, int] = DEFAULT_POOL
    freed_ns: int | None = None
    # When the allocator could hand it out again, where that was later: other streams were still using it.
    released_ns: int | None = None
    # Of the first use as a tensor; None: there was none.
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def is_temporary(self) -> bool:
        """Return whether its own operator freed it again: a kernel's scratch memory, which no tensor shows."""
        return self.freed_ns is not None and 0 < self.freed_ns <= self.origin.op_end_ns


@dataclass(slots=True)
class History:
    """The recorded entries of one GPU."""

    device: str
    allocations: list[Allocation] = field(default_factory=list)  # in the allocator's order
    retired: list[tuple[int, tuple[int, int]]] = field(default_factory=list)  # as `events.Recorded.retired`
    # After each allocation and free: its time, and the bytes that were requested and not freed since the beginning.
    # Below 0 once memory is freed that was there before.
    held: list[tuple[int, int]] = field(default_factory=list)
    num_entries: int = 0  # of the recording
    unmatched: int = 0  # allocations and frees that the profiler saw and the allocator did not record

    def missing(self, blocks: Mapping[int, int], before: Mapping[int, int]) -> int:
        """Return how many bytes are in the GPU's `blocks` when the run ended and not in the history, or the other way
        round. What became of those that were there `before` is not looked at."""
        alive = {one.address: one.num_bytes for one in self.allocations if one.freed_ns is None}
        return sum(
            max(alive.get(address, 0), blocks.get(address, 0))
            for address in alive.keys() | blocks.keys()
            if alive.get(address) != blocks.get(address) and before.get(address) != blocks.get(address)
        )


class CounterSample(NamedTuple):
    """The values of torch's counters, at some time between two."""

    from_ns: int
    to_ns: int
    requested_bytes: int


class CounterGap(NamedTuple):
    """The disagreements of torch's counters and the recorded history."""

    time_ns: int
    counted_bytes: int  # requested and not freed since the run's beginning, by torch's counters
    recorded_bytes: int  # the same by the allocations and frees that were recorded


def read_history(snapshot: Mapping[str, Any], gpu: int, seen: Sequence[MemoryEvent]) -> History:
    """Read what a snapshot (torch.cuda.memory._snapshot) has of one GPU; `seen` is the profiler's, in order of time."""
    recorded = snapshot["device_traces"][gpu]
    entries = [entry for entry in recorded if "addr" in entry]
    pools = _Pools(snapshot, gpu)
    times, origins, unmatched = _matched(entries, seen)
    found = History(f"cuda:{gpu}", num_entries=len(recorded), unmatched=unmatched)
    alive: dict[int, Allocation] = {}
    freed: dict[int, tuple[int, Allocation]] = {}
    private: set[tuple[int, int]] = set()
    held = 0
    for number, (entry, time_ns) in enumerate(zip(entries, times, strict=True)):
        action, address, size = entry["action"], entry["addr"], entry["size"]
        pool = pools.of(entry)
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
            gone = alive.pop(address, None)
            if gone is not None:
                gone.freed_ns = time_ns
                freed[address] = (number, gone)
            held -= size if gone is None else gone.num_bytes
        elif action == Action.FREE_COMPLETED:
            requested, gone = freed.pop(address, (number, None))
            if gone is not None and number > requested + 1:
                gone.released_ns = time_ns
        elif action == Action.SEGMENT_FREE and pool != DEFAULT_POOL and pool not in private:
            private.add(pool)
            found.retired.append((time_ns, pool))
        if action in _TAKEN_AND_FREED:
            found.held.append((time_ns, held))
    return found


def largest_difference(history: History, readings: Iterable[CounterSample], before_bytes: int) -> CounterGap | None:
    """Return where the counters are furthest from what was recorded, None if they agree at every reading of torch's
    `requested_bytes`, which had `before_bytes` when the run began."""
    times = [time_ns for time_ns, _ in history.held]
    found, largest = None, 0
    for from_ns, to_ns, requested in readings:
        counted = requested - before_bytes
        # Another thread may allocate while the counters are read: any value of that time is right.
        begin, end = bisect.bisect_left(times, from_ns - _SLACK_NS), bisect.bisect_right(times, to_ns + _SLACK_NS)
        recorded = [history.held[begin - 1][1] if begin else 0, *(held for _, held in history.held[begin:end])]
        nearest = min(recorded, key=lambda held: abs(held - counted))
        if abs(nearest - counted) > largest:
            found, largest = CounterGap(to_ns, counted, nearest), abs(nearest - counted)
    return found


def live_blocks(snapshot: Mapping[str, Any], gpu: int) -> dict[int, int]:
    """Return the bytes that were requested, by address, of the blocks that are allocated in a snapshot."""
    return {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment["device"] == gpu
        for block in segment["blocks"]
        if block["state"] == BlockState.ALLOCATED
    }


class _Pools:
    """The pool that an entry's memory is from: newer releases say it there, others say it of segments alone."""

    def __init__(self, snapshot: Mapping[str, Any], gpu: int) -> None:
        segments = [segment for segment in snapshot["segments"] if segment["device"] == gpu]
        self._segments = sorted(
            (segment["address"], segment["address"] + segment["total_size"], tuple(segment["segment_pool_id"]))
            for segment in segments
            if "segment_pool_id" in segment
        )

    def of(self, entry: Mapping[str, Any]) -> tuple[int, int]:
        if "pool_id" in entry:
            return tuple(entry["pool_id"])
        at = bisect.bisect_right(self._segments, entry["addr"], key=lambda segment: segment[0]) - 1
        if at >= 0 and entry["addr"] < self._segments[at][1]:
            return self._segments[at][2]
        return DEFAULT_POOL


def _matched(entries: Sequence[Any], seen: Sequence[MemoryEvent]) -> tuple[list[int], dict[int, OperatorOrigin], int]:
    """Return the time of each entry in nanoseconds, the operators around those that the profiler saw, and how many it
    saw that are not here."""
    ours: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if entry["action"] in _TAKEN_AND_FREED:
            ours[entry["addr"], entry["action"] == Action.ALLOC].append(number)
    theirs: dict[tuple[int, bool], list[MemoryEvent]] = defaultdict(list)
    for one in seen:
        theirs[one.address, one.num_bytes >= 0].append(one)
    coarse = [entry["time_us"] * 1000 for entry in entries]
    ahead = [
        one.time_ns - coarse[number]
        for key, some in theirs.items()
        if len(some) == len(ours.get(key, ()))
        for number, one in zip(ours[key], some, strict=True)
    ]
    skew = int(median(ahead)) if ahead else 0
    times = [time_ns + skew for time_ns in coarse]
    origins: dict[int, OperatorOrigin] = {}
    unmatched = 0
    for key, some in theirs.items():
        numbers = ours.get(key, [])
        unmatched += max(len(some) - len(numbers), 0)
        for number, one in _nearest(some, numbers, times):
            origins[number], times[number] = one.origin, one.time_ns
    # The allocator's order is right; nothing happens at the same time as something else.
    for number in range(1, len(times)):
        times[number] = max(times[number], times[number - 1] + 1)
    return times, origins, unmatched


def _nearest(some: list[MemoryEvent], numbers: list[int], times: list[int]) -> list[tuple[int, MemoryEvent]]:
    """Pair what the profiler saw at one address, in order, with the entries that are nearest in time."""
    pairs, at = [], 0
    for position, one in enumerate(some):
        last = len(numbers) - (len(some) - position)  # those that follow need one each
        while at < last and abs(times[numbers[at + 1]] - one.time_ns) <= abs(times[numbers[at]] - one.time_ns):
            at += 1
        if at >= len(numbers):
            break
        pairs.append((numbers[at], one))
        at += 1
    return pairs
