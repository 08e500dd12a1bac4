"""Blocks that other streams used: freed by the program, but busy until those streams are done.

Source: `insert_events`, `process_events` and `synchronize_and_free_events` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

from memprof.allocator.blocks import Block


class Completion(enum.StrEnum):
    """When the work of other streams (record_stream) is done: no allocator can know, so it is a parameter."""

    IMMEDIATE = "immediate"  # before the next malloc looks: the most reuse that is possible
    AT_SYNC = "at sync"  # only when the allocator waits for it, or `complete` is called: the least


class PendingFrees:
    """One queue of events per stream, as `cuda_events`; `release` makes a block free once its last event is done."""

    def __init__(self, release: Callable[[Block], None], completion: Completion) -> None:
        self.release = release
        self.completion = completion
        self.queues: dict[int, deque[Block]] = {}
        self.waiting = False
        """False: nothing to poll for."""

    def add(self, block: Block) -> None:
        """`block` is freed and has stream uses."""
        self.waiting = True
        streams = sorted(block.uses or ())
        block.events = len(streams)
        for stream in streams:
            self.queues.setdefault(stream, deque()).append(block)
        block.uses = None

    def poll(self) -> None:
        """What every malloc does: look which events are done."""
        if self.completion is Completion.IMMEDIATE:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for all of them."""
        for queue in self.queues.values():
            while queue:
                block = queue.popleft()
                block.events -= 1
                if not block.events:
                    self._done(block)
        self.queues.clear()
        self.waiting = False

    def complete(self, block: Block) -> None:
        """All work on `block` is done, whatever `completion` says."""
        for queue in self.queues.values():
            while block in queue:
                queue.remove(block)
        self._done(block)

    def _done(self, block: Block) -> None:
        block.uses = None
        block.events = 0
        self.release(block)
