"""Records of a measured run, each with its time: phases, modules, owners of tensors, and counters.

Recording is an append to a list: most overhead of a measured run is the profiler's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from memprof.trace.events import EventKind, Owner, Phase


class Mark(NamedTuple):
    """The beginning of a phase, or the beginning or end of a module's forward."""

    time_ns: int
    kind: EventKind
    ref: int  # index of the phase, or of the module


class OwnerMark(NamedTuple):
    """Role and name of the tensor whose storage is at `address` at this time."""

    time_ns: int
    address: int
    owner: Owner
    shape: tuple[int, ...]
    dtype: str
    on_host: bool  # the tensor stays in host memory on any device (an optimizer's step count)


class FreedStorage(NamedTuple):
    """Storage in host memory at `address`: the times at which it was known to exist, and at which it was freed."""

    seen_ns: int
    freed_ns: int
    address: int


# Bytes as in `Sample`: allocated, peak allocated, reserved, used on the device, resident.
Counters = tuple[int | None, int | None, int | None, int | None, int | None]


class Marks:
    """All marks of one run; `read_device` returns the device's current counters."""

    def __init__(self, read_device: Callable[[], Counters]) -> None:
        self._read_device = read_device
        self.phases: list[Phase] = []
        self.marks: list[Mark] = []
        self.owner_marks: list[OwnerMark] = []
        self.freed_storages: list[FreedStorage] = []
        self.counter_samples: list[tuple[int, Counters]] = []  # each with its time, in nanoseconds

    def begin_phase(self, phase: Phase) -> None:
        """Record that `phase` begins; later events belong to it."""
        self.read_counters()
        self.phases.append(phase)
        self.marks.append(Mark(time.time_ns(), EventKind.PHASE, len(self.phases) - 1))

    def watch_storage(self, storage: torch.UntypedStorage) -> None:
        """Record when `storage` is freed; the profiler misses frees in threads that it does not profile."""
        seen_ns, address, append = time.time_ns(), storage.data_ptr(), self.freed_storages.append
        # torch keeps the Python object of a storage for as long as the storage itself.
        weakref.finalize(storage, lambda: append(FreedStorage(seen_ns, time.time_ns(), address))).atexit = False

    def read_counters(self) -> None:
        """Read the device's counters, and record them with the time."""
        # The time is taken after the read: the GPU work that the read waited for is done.
        counters = self._read_device()
        self.counter_samples.append((time.time_ns(), counters))
