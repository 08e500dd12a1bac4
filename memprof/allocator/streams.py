"""Frees of blocks that other streams use: the blocks stay busy until those streams are done.

Source: `insert_events`, `process_events` and `synchronize_and_free_events` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from memprof.allocator.blocks import Block


class Completion(enum.StrEnum):
    """When work of other streams completes that delays a free (record_stream): a replay has to assume it."""

    IMMEDIATE = "immediate"  # before the next malloc polls: the most reuse
    ORDERED = "ordered"  # once the host or another stream has waited for the work, or a phase of the run has ended
    AT_SYNC = "at sync"  # only when the host, or the allocator itself, has waited: the least reuse


class _Marker(NamedTuple):
    """A CUDA event on a stream, recorded at `time`, after which `block` can be freed."""

    time: int
    block: Block


class PendingFrees:
    """Frees that wait for other streams: a queue of events per stream. `release` frees a block after its last event."""

    def __init__(self, release: Callable[[Block], None], completion: Completion) -> None:
        self.release = release
        self.completion = completion
        self.queues: dict[int, deque[_Marker]] = {}
        self.completed_before: dict[int, int] = {}  # by stream: a time
        self.now = 0  # time of frees: the caller's own clock
        self.requested_bytes = 0  # requested bytes of the waiting blocks

    def add(self, block: Block) -> None:
        """Delay the free of `block`: queue an event on each stream that used it."""
        streams = sorted(block.uses or ())
        block.events = len(streams)
        for stream in streams:
            self.queues.setdefault(stream, deque()).append(_Marker(self.now, block))
        block.uses = None
        self.requested_bytes += block.requested

    def record_wait(self, stream: int, time: int, *, by_host: bool) -> None:
        """Record that the host, or another stream, waits for the work of `stream` enqueued before `time`."""
        if by_host or self.completion is not Completion.AT_SYNC:
            self.completed_before[stream] = max(self.completed_before.get(stream, 0), time)

    def end_phase(self, time: int) -> None:
        """Complete all work enqueued before `time`, at the end of a phase."""
        for stream in self.queues:
            self.record_wait(stream, time, by_host=False)

    def poll(self) -> None:
        """Free the blocks whose streams are known to be done, as every malloc does."""
        if self.completion is Completion.IMMEDIATE:
            self.synchronize()
            return
        for stream in self.queues.keys() & self.completed_before.keys():
            self._pop_completed(stream, self.completed_before[stream])

    def synchronize(self) -> None:
        """Complete the events of all streams."""
        for stream in list(self.queues):
            self._pop_completed(stream, None)

    def complete(self, block: Block) -> None:
        """Free `block` now, regardless of `completion`."""
        for stream, queue in list(self.queues.items()):
            remaining = deque(marker for marker in queue if marker.block is not block)
            if remaining:
                self.queues[stream] = remaining
            else:
                del self.queues[stream]
        self._finish_free(block)

    def _pop_completed(self, stream: int, before: int | None) -> None:
        """Complete the events of `stream` before the time `before` (None: all), and free their blocks."""
        queue = self.queues[stream]
        while queue and (before is None or queue[0].time < before):
            block = queue.popleft().block
            block.events -= 1
            if not block.events:
                self._finish_free(block)
        if not queue:
            del self.queues[stream]

    def _finish_free(self, block: Block) -> None:
        block.uses = None
        block.events = 0
        self.requested_bytes -= block.requested
        self.release(block)
