"""Memory of a run that took it on several streams: free blocks of one are of no use to another."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memprof.allocator import TraceReplay
from memprof.ledger.ledger import Ledger
from memprof.trace.events import EventKind
from memprof.trace.snapshot import BlockState, SnapshotSegment

_OF_STREAMS = (EventKind.STREAM, EventKind.USE, EventKind.WAIT)


@dataclass(frozen=True, slots=True)
class StreamShare:
    """The segments of one stream, where most is reserved."""

    stream: int  # Its number; 0 is the default one.
    reserved_bytes: int
    allocated_bytes: int
    # Freed, and until they are known to be done with it in use by other streams (Tensor.record_stream).
    waiting_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """The bytes that streams cost; the most that is reserved is on a GPU without limit, and without its context."""

    streams: tuple[StreamShare, ...]  # By number.
    reserved_bytes: int  # The most that is reserved.
    single_stream_bytes: int  # The same if all had been taken on one stream.
    lower_bound_bytes: (
        int | None
    )  # The same if what other streams borrowed were free at once; None: nothing is borrowed.
    upper_bound_bytes: int | None  # If it were free only once the host has waited for them.

    @classmethod
    def of(cls, ledger: Ledger) -> StreamMemory | None:
        """Return the cost of streams; None: all memory was taken on one stream, and no other borrowed any."""
        run, trace = ledger.run, ledger.trace
        if not (run.bounds or any(event.kind is EventKind.STREAM for event in trace.events)):
            return None
        segments, _ = run.layout_at(ledger.peak_reserved_event)
        numbers = sorted({segment.stream for segment in segments})
        if len(numbers) < 2 and run.bounds is None:
            return None
        events = [event for event in trace.events if event.kind not in _OF_STREAMS]
        on_one_stream = dataclasses.replace(trace, events=events, uses=[], waits=[])
        replay = TraceReplay(on_one_stream, None, run.config, run.release, counts=False)
        replay.advance(writes=False)
        return cls(
            streams=tuple(_share(number, [one for one in segments if one.stream == number]) for number in numbers),
            reserved_bytes=run.required_reserved_bytes,
            single_stream_bytes=replay.allocator.counters.reserved_bytes_peak,
            lower_bound_bytes=None if run.bounds is None else run.bounds.lower_bound_bytes,
            upper_bound_bytes=None if run.bounds is None else run.bounds.upper_bound_bytes,
        )


def _share(stream: int, segments: list[SnapshotSegment]) -> StreamShare:
    reserved, allocated = sum(one.size for one in segments), sum(one.allocated for one in segments)
    waiting = sum(block.size for one in segments for block in one.blocks if block.state is BlockState.PENDING_FREE)
    return StreamShare(stream, reserved, allocated, waiting, reserved - allocated - waiting)
