"""Runs a program on an allocator and records it as torch would, so that recordings of any kind can be replayed."""

from __future__ import annotations

from memprof.allocator import AllocatorConfig, Block, CachingAllocator, Completion, OutOfMemory, SimulatedDriver
from memprof.trace.snapshot import Action, Snapshot, SnapshotEvent


class RecordingDriver(SimulatedDriver):
    def __init__(self, total_bytes: int, recorder: Recorder) -> None:
        super().__init__(total_bytes)
        self.recorder = recorder

    def malloc(self, size: int) -> int | None:
        address = super().malloc(size)
        if address is not None:
            self.recorder.write(Action.SEGMENT_ALLOC, address, size)
        return address

    def free(self, address: int, size: int) -> None:
        super().free(address, size)
        self.recorder.write(Action.SEGMENT_FREE, address, size, self.recorder.stream_of(address))

    def map(self, address: int, size: int) -> bool:
        done = super().map(address, size)
        if done:
            self.recorder.write(Action.SEGMENT_MAP, address, size)
        return done

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self.recorder.write(Action.SEGMENT_UNMAP, address, size, self.recorder.stream_of(address))


class Recorder:
    """An allocator whose every step ends up in a trace."""

    def __init__(self, config: AllocatorConfig, total_bytes: int, completion: Completion = Completion.AT_SYNC) -> None:
        self.config = config
        self.events: list[SnapshotEvent] = []
        self.stream = 0
        self.allocator = CachingAllocator(
            total_bytes, config, driver=RecordingDriver(total_bytes, self), completion=completion
        )
        self.allocator.pending.release = self._completed

    def malloc(self, num_bytes: int, stream: int = 0) -> Block | None:
        self.stream = stream
        try:
            block = self.allocator.malloc(num_bytes, stream)
        except OutOfMemory as error:
            self.write(Action.OOM, error.report.free_bytes, num_bytes)
            return None
        self.write(Action.ALLOC, block.address, num_bytes)
        return block

    def free(self, block: Block) -> None:
        owner = block.owner
        at_once = not block.uses
        self.write(Action.FREE_REQUESTED, block.address, block.requested, owner.stream)
        if at_once:
            self.write(Action.FREE_COMPLETED, block.address, block.requested, owner.stream)
        self.allocator.free(block)

    def write(self, action: Action, address: int, size: int, stream: int | None = None) -> None:
        stream = self.stream if stream is None else stream
        self.events.append(SnapshotEvent(action, address, size, stream, (0, 0), None, ()))

    def stream_of(self, address: int) -> int:
        for segment in self.allocator.segment_store.live.values():
            if segment.address <= address < segment.address + segment.size:
                return segment.first.owner.stream
        raise AssertionError(address)

    def snapshot(self, last: int | None = None) -> Snapshot:
        """What a recording of the `last` events (all, unless given) would be."""
        events = self.events if last is None else self.events[len(self.events) - last :]
        settings: dict[str, object] = {"PYTORCH_CUDA_ALLOC_CONF": self.config.text}
        return Snapshot(self.allocator.segments(), [list(events)], settings)

    def _completed(self, block: Block) -> None:
        self.write(Action.FREE_COMPLETED, block.address, block.requested, block.owner.stream)
        self.allocator._free_block(block)
