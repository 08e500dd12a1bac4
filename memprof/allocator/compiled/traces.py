"""The events of a trace for the compiled rules, and what they say of it as its timeline has it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from memprof.allocator.compiled import rules
from memprof.allocator.compiled.loading import Compiled
from memprof.allocator.compiled.rules import Array, Events, Results
from memprof.allocator.compiled.stretches import Stretches, countable
from memprof.trace.events import EventKind, Storage, Trace
from memprof.trace.one_thread import np

if TYPE_CHECKING:
    from memprof.allocator.replay import TraceReplay

_ODD = (EventKind.EMPTY_CACHE, EventKind.USE, EventKind.WAIT, EventKind.POOL, EventKind.POOL_FREE)


class TraceStretches:
    """The events of a trace from where a replay has come to up to `end`.

    Raises:
        OverflowError: numbers that no allocator has.
    """

    def __init__(self, compiled: Compiled, replay: TraceReplay, end: int) -> None:
        self.base = replay.event
        self.end = end
        self.replay = replay
        self.events = _columns(replay.trace, self.base, end, replay.stream)
        self.stretches = Stretches(compiled, replay.allocator, self.events, len(replay.trace.storages))

    def play(self, *, writes: bool) -> int:
        """Play what can be of the events that follow; the event up to which plain Python goes on."""
        replay, stretches, base = self.replay, self.stretches, self.base
        begin = replay.event - base
        least = stretches.least(len(replay.live))
        if stretches.next_odd(begin) - begin < least:
            return min(base + stretches.next_odd(begin) + 1, self.end)
        found = None
        if not writes or self._peak_is_known():
            write, obtained = (self._write, self._obtained) if writes else (_nothing, _nothing)
            found = stretches.play(begin, replay.pool, replay.live, write, obtained)
        if found is None:
            return min(base + begin + least, self.end)
        after, replay.live = found
        if after > begin:
            replay.stream = int(self.events.streams[after - 1])
        replay.event = base + after
        return min(base + stretches.go_on(begin, after, least), self.end)

    def _peak_is_known(self) -> bool:
        """Whether a peak of what is reserved waits for no request to be laid to."""
        return self.replay.allocator.counters.reserved_bytes_peak <= self.replay.timeline.peak_reserved.num_bytes

    def _write(self, begin: int, end: int, results: Results) -> None:
        timeline, count = self.replay.timeline, end - begin
        timeline.requested.frombytes(results.requested[:count].tobytes())
        timeline.allocated.frombytes(results.allocated[:count].tobytes())
        reserved = self.replay.allocator.counters.reserved_bytes
        timeline.reserved.frombytes(np.full(count, reserved, np.int64).tobytes())
        taken = np.flatnonzero(self.events.kinds[begin:end] == rules.TAKE)
        names = self.events.names[begin:end][taken].tolist()
        timeline.blocks.update(zip(names, results.sizes[taken].tolist(), strict=True))
        timeline.addresses.update(zip(names, results.addresses[taken].tolist(), strict=True))

    def _obtained(self, event: int) -> None:
        self.replay.note_peak(self.base + event)


def _nothing(*given: object) -> None:
    """Write nothing."""


def _columns(trace: Trace, begin: int, end: int, stream: int) -> Events:
    """What the events are to the compiled rules; those of other devices and empty storages are nothing."""
    events, count = trace.events[begin:end], end - begin
    kinds = np.frombuffer(bytes(map(itemgetter(0), events)), np.uint8)
    refs = np.fromiter(map(itemgetter(1), events), np.int64, count)
    touch = np.flatnonzero((kinds == EventKind.ALLOC) | (kinds == EventKind.FREE))
    sizes, found = np.zeros(count, np.int64), np.zeros(count, np.uint8)
    sizes[touch] = _bytes_on(trace.device, trace.storages)[refs[touch]]
    if not countable(sizes, len(touch)):
        raise OverflowError
    found[(kinds == EventKind.ALLOC) & (sizes > 0)] = rules.TAKE
    found[(kinds == EventKind.FREE) & (sizes > 0)] = rules.GIVE
    found[np.isin(kinds, _ODD)] = rules.ODD
    if trace.refused:
        found[touch[np.isin(refs[touch], list(trace.refused))]] = rules.ODD
    moved = np.flatnonzero(kinds == EventKind.STREAM)
    streams = np.repeat(np.append(stream, refs[moved]), np.diff(np.concatenate(([0], moved, [count]))))
    names = np.where(found > rules.NOTHING, refs, 0).astype(np.int32)
    return Events(found, names, sizes, streams.astype(np.int64), np.zeros(0, np.int64))


def _bytes_on(device: str, storages: Sequence[Storage]) -> Array:
    """The bytes of each storage on a device, and 0 of others."""
    count = len(storages)
    found = np.fromiter(map(attrgetter("num_bytes"), storages), np.int64, count)
    found *= np.fromiter(map(device.__eq__, map(attrgetter("device"), storages)), np.bool_, count)
    return found
