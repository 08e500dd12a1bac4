"""`AllocatorHistory`: what torch's CUDA allocator itself wrote down about a block of code."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import torch

MAX_ENTRIES = 500_000


class Entry(NamedTuple):
    # As torch names it: alloc, free_requested, free_completed, segment_alloc, ...
    action: str
    address: int
    num_bytes: int
    stream: int


class AllocatorHistory:
    """A context manager; afterwards `entries` has what happened inside, in order; on the CPU it stays empty."""

    def __init__(self, device: str) -> None:
        self._records = device == "cuda"
        self.entries: list[Entry] = []

    def __enter__(self) -> AllocatorHistory:
        if self._records:
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(enabled=None)  # what an earlier block left is dropped
            torch.cuda.memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=MAX_ENTRIES
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._records:
            current = torch.cuda.current_device()
            self.entries = [
                Entry(entry["action"], entry.get("addr", 0), entry["size"], entry.get("stream", 0))
                for entry in torch.cuda.memory._snapshot()["device_traces"][current]
            ]
            torch.cuda.memory._record_memory_history(enabled=None)

    def bytes_of(self, action: str) -> list[int]:
        """Return the bytes of each entry with this action, in order."""
        return [entry.num_bytes for entry in self.entries if entry.action == action]
