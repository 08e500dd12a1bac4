"""Out-of-memory errors of a recording, explained: requested bytes, free bytes, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.allocator.rounding import FRAGMENTED_SHARE, SMALL_BUFFER, SMALL_SIZE, round_size, segment_size
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS
from memprof.snapshots.occupancy import measure_fragmentation
from memprof.snapshots.origins import find_origin
from memprof.snapshots.recording import Recording
from memprof.trace.columns import OOM
from memprof.units import format_bytes


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    """One out-of-memory error."""

    event: int
    requested_bytes: int
    tried_bytes: int  # The segment that the driver refused, as in torch's message.
    device_free_bytes: int  # Free on the GPU, outside torch's cache.
    allocated_bytes: int
    reserved_bytes: int
    cached_bytes: int  # Reserved and not in use.
    usable_bytes: int  # Cached in the pool and on the stream of the request.
    largest_free_bytes: int  # Largest free block in that pool and on that stream.
    # Whether cached and free device memory together would have sufficed, with a considerable share of cached memory
    # (FRAGMENTED_SHARE).
    fragmented: bool
    source: str
    reasons: tuple[str, ...]


def find_out_of_memory_events(recording: Recording) -> list[OutOfMemoryEvent]:
    """Return every out-of-memory error of `recording`, in order."""
    return [_explain_oom_event(recording, index) for index in recording.events.find_indices(OOM)]


def _explain_oom_event(recording: Recording, index: int) -> OutOfMemoryEvent:
    event = recording.events[index]
    size = round_size(event.size)
    state, segments = measure_fragmentation(recording, index)
    is_small = size <= SMALL_SIZE
    mine = [s for s in segments if s.stream == event.stream and s.is_small == is_small and s.pool_id == event.pool_id]
    usable_bytes = sum(segment.free for segment in mine)
    largest_free = max((segment.largest_free for segment in mine), default=0)
    expandable = any(segment.expandable for segment in segments)
    large_segment = recording.replay.config.large_segment_size
    tried_bytes = size if expandable else segment_size(size, large_segment)
    unit = (SMALL_BUFFER if is_small else large_segment) if expandable else 1
    is_limited = event.address >= -(-tried_bytes // unit) * unit  # the GPU itself had room
    missing = size - state.free_bytes - event.address
    min_fragmented_bytes = max(1, FRAGMENTED_SHARE * state.reserved_bytes)
    fragmented = not is_limited and missing <= 0 and state.free_bytes >= min_fragmented_bytes
    reasons = [
        f"{format_bytes(event.size)} were requested; the GPU had {format_bytes(event.address)} free",
        f"torch held {format_bytes(state.reserved_bytes)}, {format_bytes(state.used_bytes)} of it in use and "
        f"{format_bytes(state.free_bytes)} cached",
    ]
    if state.free_bytes:
        num_pinned = sum(1 for segment in mine if segment.pinned)
        reasons.append(
            f"of the cache, {format_bytes(usable_bytes)} are in the {'small' if is_small else 'large'} pool of stream "
            f"{event.stream}, and the largest free block there has {format_bytes(largest_free)}"
        )
        if state.releasable_bytes:
            reasons.append(f"{format_bytes(state.releasable_bytes)} were wholly free, and were not released")
        elif num_pinned:
            reasons.append(
                "none of it could go back to the GPU: every segment with free memory there "
                f"({num_pinned}) holds a block in use"
            )
    if is_limited:
        reasons.append("the GPU is not full: a limit of the process was reached (set_per_process_memory_fraction)")
    elif fragmented:
        reasons.append(
            "fragmentation: free memory was enough in sum, but in no single piece"
            + ("" if expandable else f"; {EXPANDABLE_SEGMENTS} can use it (see --alloc-conf)")
        )
    elif missing > 0:
        reasons.append(f"not fragmentation: even with the whole cache {format_bytes(missing)} would have been missing")
    elif not state.free_bytes:
        reasons.append(f"torch asks the GPU for a segment of {format_bytes(tried_bytes)}, which is more than is free")
    else:
        share = 100 * state.used_bytes / state.reserved_bytes
        reasons.append(
            f"the GPU is full: {share:.0f}% of what torch holds is in use; in one piece the rest would have served "
            f"this request, and {format_bytes(-missing)} more"
        )
    _, allocated, reserved = recording.at(index)
    return OutOfMemoryEvent(
        event=index,
        requested_bytes=event.size,
        tried_bytes=tried_bytes,
        device_free_bytes=event.address,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        cached_bytes=state.free_bytes,
        usable_bytes=usable_bytes,
        largest_free_bytes=largest_free,
        fragmented=fragmented,
        source=find_origin(event.frames).source,
        reasons=tuple(reasons),
    )
