"""The allocator of a run that is still going on: what a program is told that asks for its memory statistics."""

from __future__ import annotations

from memprof.allocator.config import AllocatorConfig
from memprof.allocator.on_card import Card
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.replay import TraceReplay
from memprof.trace.events import Trace

_COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
"""What `resetAccumulatedStats` of c10/cuda/CUDACachingAllocator.cpp sets to zero, beside `.allocated` and `.freed`."""


class LiveAllocator:
    """Follows a trace that grows, and only when asked: each question replays what happened since the last one.

    Args:
        trace: what the recorder writes.
        card: the card of the run.
        config: the allocator's settings.
        release: whose rules.
    """

    def __init__(
        self, trace: Trace, card: Card, config: AllocatorConfig | None = None, release: Release = LATEST
    ) -> None:
        self._replay = TraceReplay(trace, card.usable_bytes, config, release, total_bytes=card.total_bytes)

        self._before: dict[str, int] = {}
        """Accumulated counters at their last reset."""

    def stats(self) -> dict[str, int]:
        """torch.cuda.memory_stats() now."""
        now = self._now()
        return {name: value - self._before.get(name, 0) for name, value in now.items()}

    def reset_peak(self) -> None:
        """torch.cuda.reset_peak_memory_stats()."""
        self._replay.skip()
        self._replay.allocator.statistics.reset_peak()

    def reset_accumulated(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats()."""
        now = self._now()
        self._before = {name: now[name] for name in now if name.endswith((".allocated", ".freed")) or name in _COUNTS}

    def _now(self) -> dict[str, int]:
        self._replay.skip()
        return self._replay.allocator.stats()
