"""Timestamped marks of a measured run: phases, module calls, owners and samples.

Recording a mark is an append to a list: most of the overhead of a measured run is due to the profiler.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from memprof.trace.events import EventKind, Owner, Phase


class Mark(NamedTuple):
    """Begin of a phase, or begin or end of a module's forward."""

    time_ns: int
    kind: EventKind
    ref: int  # index of the phase, or of the module


class Claim(NamedTuple):
    """Role of the storage that is at an address at this time."""

    time_ns: int
    address: int
    owner: Owner
    shape: tuple[int, ...]
    dtype: str
    on_host: bool  # the tensor stays in host memory on any device (an optimizer's step count)


class FreedStorage(NamedTuple):
    """Storage in host memory that was seen at an address, and freed later."""

    seen_ns: int
    freed_ns: int
    address: int


# Bytes as in `Sample`: allocated, peak allocated, reserved, used on the device, resident.
Counters = tuple[int | None, int | None, int | None, int | None, int | None]


class Marks:
    """All marks of one run; `read` reads the device's counters, and `Marks` adds the time."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self.phases: list[Phase] = []
        self.marks: list[Mark] = []
        self.claims: list[Claim] = []
        self.freed_storages: list[FreedStorage] = []
        self.counter_samples: list[tuple[int, Counters]] = []  # each with its time, in nanoseconds

    def begin_phase(self, phase: Phase) -> None:
        """Begin `phase`, to which events belong from now on."""
        self.read_counters()
        self.phases.append(phase)
        self.marks.append(Mark(time.time_ns(), EventKind.PHASE, len(self.phases) - 1))

    def watch_storage(self, storage: torch.UntypedStorage) -> None:
        """Record when `storage` is freed: the profiler does not see a free by another thread."""
        seen_ns, address, append = time.time_ns(), storage.data_ptr(), self.freed_storages.append
        # torch keeps the Python object of a storage for as long as the storage itself.
        weakref.finalize(storage, lambda: append(FreedStorage(seen_ns, time.time_ns(), address))).atexit = False

    def read_counters(self) -> None:
        """Read the counters and append them with the time."""
        # The time is taken after the read: the GPU work that the read waited for is done.
        values = self._read()
        self.counter_samples.append((time.time_ns(), values))
