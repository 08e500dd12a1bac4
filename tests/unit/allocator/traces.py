"""Traces of storages on streams, for replays."""

from __future__ import annotations

from typing import Any

from memprof.allocator import Completion, TraceReplay
from memprof.trace.events import GPU, EventKind, PhaseKind, StreamEvent, Trace, Use, Wait
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


class StreamScript(TraceBuilder):
    """On several streams, which lend each other memory and wait for each other."""

    def __init__(self) -> None:
        super().__init__(PhaseKind.OTHER)
        self.home: dict[int, int] = {}  # Stream of each living storage.

    def alloc(self, num_bytes: int, *, stream: int = 0, **more: Any) -> int:
        self.add(EventKind.STREAM, stream)
        index = super().alloc(num_bytes, **more)
        self.home[index] = stream
        return index

    def free(self, *indices: int) -> None:
        super().free(*indices)
        for index in indices:
            del self.home[index]

    def use(self, index: int, stream: int) -> None:
        self.add(EventKind.USE, len(self.trace.uses))
        self.trace.uses.append(Use(index, stream))

    def wait(self, stream: int, *, by_host: bool, before: int | None = None) -> None:
        before = len(self.trace.events) if before is None else before
        self.add(EventKind.WAIT, len(self.trace.waits))
        self.trace.waits.append(Wait(by_host, (StreamEvent(GPU, stream, before),)))

    def active(self, completion: Completion = Completion.ORDERED) -> int:
        """MiB that are not free, after what another request finds done."""
        replay = TraceReplay(self.trace, None, completion=completion)
        replay.advance(writes=False)
        replay.allocator.free(replay.malloc(1))
        return replay.allocator.counters.active_bytes // MIB


def outgrown_blocks() -> Trace:
    """Freed tensors of 30 MiB leave segments that the larger ones after them cannot use."""
    b = TraceBuilder()
    small = [b.alloc(30 * MIB) for _ in range(4)]
    b.free(*small)
    for _ in range(3):
        b.alloc(40 * MIB)
    return b.trace
