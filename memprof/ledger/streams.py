"""Memory of a run on several streams: a free block of one stream does not serve another stream."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memprof.allocator import TraceReplay
from memprof.ledger.ledger import Ledger
from memprof.trace.events import EventKind
from memprof.trace.snapshot import BlockState, SnapshotSegment


@dataclass(frozen=True, slots=True)
class StreamShare:
    """The segments of one stream, at the reserved peak."""

    stream: int  # Stream number; 0 is the default stream.
    reserved_bytes: int
    allocated_bytes: int
    # Freed, and in use by other streams until their work is known to be done (Tensor.record_stream).
    waiting_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """The memory cost of streams; reserved peaks are on a GPU without limit, and without its context."""

    streams: tuple[StreamShare, ...]  # By number.
    reserved_bytes: int  # The reserved peak.
    single_stream_bytes: int  # The same if all memory were allocated on one stream.
    lower_bound_bytes: int | None  # The same if memory used by other streams were free at once; None: no memory is.
    upper_bound_bytes: int | None  # The same if it were free only once the host has waited for them.

    @classmethod
    def from_ledger(cls, ledger: Ledger) -> StreamMemory | None:
        """Return the memory cost of streams in a run; None: all memory was allocated and used on one stream."""
        run, trace = ledger.run, ledger.trace
        if not (run.bounds or any(event.kind is EventKind.STREAM for event in trace.events)):
            return None
        segments, _ = run.layout_at(ledger.peak_reserved_event)
        stream_ids = sorted({segment.stream for segment in segments})
        if len(stream_ids) < 2 and run.bounds is None:
            return None
        events = [event for event in trace.events if event.kind is not EventKind.STREAM]
        single_stream_trace = dataclasses.replace(trace, events=events, uses=[])
        replay = TraceReplay(single_stream_trace, None, run.config, run.release, counts=False)
        replay.advance(writes=False)
        return cls(
            streams=tuple(_build_share(stream, [s for s in segments if s.stream == stream]) for stream in stream_ids),
            reserved_bytes=run.required_reserved_bytes,
            single_stream_bytes=replay.allocator.counters.reserved_bytes_peak,
            lower_bound_bytes=None if run.bounds is None else run.bounds.lower_bound_bytes,
            upper_bound_bytes=None if run.bounds is None else run.bounds.upper_bound_bytes,
        )


def _build_share(stream: int, segments: list[SnapshotSegment]) -> StreamShare:
    reserved, allocated = sum(s.size for s in segments), sum(s.allocated for s in segments)
    pending_bytes = sum(block.size for s in segments for block in s.blocks if block.state is BlockState.PENDING_FREE)
    return StreamShare(stream, reserved, allocated, pending_bytes, reserved - allocated - pending_bytes)
