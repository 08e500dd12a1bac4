"""Traces of nothing but storages, for replays."""

from __future__ import annotations

from memprof.allocator import Completion, TraceReplay
from memprof.trace.events import GPU, NONE, Event, EventKind, Phase, PhaseKind, Storage, StreamEvent, Trace, Use, Wait

MIB = 1 << 20


class Script:
    def __init__(self) -> None:
        self.trace = Trace(ops=["aten.empty"], phases=[Phase(PhaseKind.OTHER, 0, 0)])
        self.trace.events.append(Event(EventKind.PHASE, 0))

    def new(self, num_bytes: int, device: str = GPU) -> int:
        index = len(self.trace.storages)
        self.trace.storages.append(
            Storage(num_bytes, (num_bytes,), "uint8", device, 0, NONE, NONE, 0, NONE, False)
        )  # fmt: skip
        self.trace.events.append(Event(EventKind.ALLOC, index))
        return index

    def free(self, *indices: int) -> None:
        self.trace.events += [Event(EventKind.FREE, index) for index in indices]

    def empty_cache(self) -> None:
        self.trace.events.append(Event(EventKind.EMPTY_CACHE, 0))


class StreamScript(Script):
    """On several streams, which lend each other memory and wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.home: dict[int, int] = {}  # Stream of each living storage.

    def add(self, kind: EventKind, ref: int) -> None:
        self.trace.events.append(Event(kind, ref))

    def new(self, num_bytes: int, device: str = GPU, *, stream: int = 0) -> int:
        self.add(EventKind.STREAM, stream)
        index = super().new(num_bytes, device)
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
    script = Script()
    small = [script.new(30 * MIB) for _ in range(4)]
    script.free(*small)
    for _ in range(3):
        script.new(40 * MIB)
    return script.trace
