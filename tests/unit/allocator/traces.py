"""Traces of nothing but storages, for replays."""

from __future__ import annotations

from memprof.trace.events import GPU, NONE, Event, EventKind, Phase, PhaseKind, Storage, Trace

MIB = 1 << 20


class Script:
    """Writes requests and frees, in order."""

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


def outgrown_blocks() -> Trace:
    """Freed tensors of 30 MiB leave segments that the larger ones after them cannot use."""
    script = Script()
    small = [script.new(30 * MIB) for _ in range(4)]
    script.free(*small)
    for _ in range(3):
        script.new(40 * MIB)
    return script.trace
