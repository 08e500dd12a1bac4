"""Whole replays: of a trace, and of bare requests."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.allocator import AllocatorConfig, Block, GpuMemory, Timeline, TraceReplay
from memprof.allocator.releases import LATEST, Release
from memprof.trace.events import Trace


def replay_trace(
    trace: Trace,
    usable_bytes: int | None = None,
    config: AllocatorConfig | None = None,
    release: Release = LATEST,
    *,
    total_bytes: int | None = None,
) -> Timeline:
    """The timeline has an entry for each event of the trace."""
    total = usable_bytes if total_bytes is None else total_bytes
    gpu = None if usable_bytes is None or total is None else GpuMemory(total, total - usable_bytes)
    player = TraceReplay(trace, gpu, config, release)
    player.advance()
    return player.finish()


def replay(requests: Iterable[tuple[int, int]], config: AllocatorConfig | None = None) -> Timeline:
    """Replay (name, bytes) requests on one stream: bytes > 0 allocates `name`, bytes = 0 frees it."""
    player = TraceReplay(Trace(), None, config)
    live: dict[int, Block] = {}
    for name, num_bytes in requests:
        if num_bytes:
            live[name] = player.malloc(num_bytes)
        else:
            player.allocator.free(live.pop(name))
        player.end_event(grew=num_bytes > 0)
    return player.finish()
