"""Replay of a recording's requests under other allocator settings, to compare reserved memory.

The requests, frees and calls of empty_cache of a recording go through a fresh allocator, on a GPU without limit. Blocks
that were live when the recording began are requested first, by address: their own history is unknown. The recorded
settings are replayed in the same way, so that the difference is due to settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.allocator import AllocatorConfig, Block, CachingAllocator, Completion
from memprof.allocator.initial_state import OTHER_STREAM, Range, completes_at_once
from memprof.snapshots.recording import BEFORE, Recording
from memprof.trace.columns import ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM
from memprof.trace.snapshot import DEFAULT_POOL, PoolId


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Memory of a replay of a recording's requests under one allocator configuration."""

    settings: str
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    final_reserved_bytes: int
    driver_allocations: int  # Segments taken from the driver in all; for expandable segments, mappings.
    final_segments: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Replays of a recording's requests under its own allocator configuration and under another."""

    before: ReplayOutcome
    after: ReplayOutcome
    saved_bytes: int  # Saved peak reserved memory; negative if the other settings need more.
    recorded_peak_reserved_bytes: int
    failed_allocations: int  # In the recording; they are left out of both replays.


def what_if(recording: Recording, new_config: AllocatorConfig) -> WhatIf:
    """Replay the requests of `recording` under its own settings and under `new_config`; return the memory of each."""
    before, after = (_replay_recording(recording, config) for config in (recording.replay.config, new_config))
    return WhatIf(
        before=before,
        after=after,
        saved_bytes=before.peak_reserved_bytes - after.peak_reserved_bytes,
        recorded_peak_reserved_bytes=recording.peak("reserved")[0],
        failed_allocations=recording.events.actions.count(OOM),
    )


def _replay_recording(recording: Recording, config: AllocatorConfig) -> ReplayOutcome:
    # A GPU without limit needs no memory fraction and no garbage collection; the recording's own limit is unknown.
    allocator = CachingAllocator(None, config, completion=Completion.AT_SYNC)
    private = [run for run in recording.replay.start.ranges if run.pool_id != DEFAULT_POOL]
    private += [Range.from_segment(segment) for segment in recording.final if segment.pool_id != DEFAULT_POOL]

    def malloc(address: int, num_bytes: int, stream: int, pool: PoolId) -> Block:
        if pool == DEFAULT_POOL:  # before 2.9 events do not name their pool
            pool = next((run.pool_id for run in private if run.address <= address < run.address + run.size), pool)
        allocator.create_pool(pool)
        return allocator.malloc(max(num_bytes, 1), stream, pool)

    live: dict[int, Block] = {}
    for life in recording.lives:
        if life.born != BEFORE:
            break
        live[life.address] = malloc(life.address, life.requested, life.stream, DEFAULT_POOL)
    flush_events = set(recording.replay.flushes)
    pending: dict[int, Block] = {}
    events = recording.events
    for index, (action, address) in enumerate(zip(events.actions, events.addresses, strict=True)):
        if index in flush_events:
            allocator.empty_cache()
        if action == ALLOC:
            pool_id = events.pool_ids[events.pools[index]]
            live[address] = malloc(address, events.sizes[index], events.streams[index], pool_id)
        elif action == FREE_REQUESTED:
            block = live.pop(address, None)
            if block is None:
                continue
            if not completes_at_once(events, index):
                allocator.record_stream(block, OTHER_STREAM)
                pending[address] = block
            allocator.free(block)
        elif action == FREE_COMPLETED:
            block_life = pending.pop(address, None)
            if block_life is not None and block_life.events:
                allocator.pending.complete(block_life)
    stats = allocator.stats()
    return ReplayOutcome(
        settings=config.text or "the defaults",
        peak_reserved_bytes=stats["reserved_bytes.all.peak"],
        peak_allocated_bytes=stats["allocated_bytes.all.peak"],
        final_reserved_bytes=stats["reserved_bytes.all.current"],
        driver_allocations=stats["num_device_alloc"],
        final_segments=len(allocator.segments()),
    )
