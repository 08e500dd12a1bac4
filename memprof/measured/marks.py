"""Marks made while a measured run goes on: phases, modules, owners and samples, each with its time.

Noting is appending to a list: what a run costs more for being measured is mostly the profiler's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from memprof.trace.events import EventKind, Owner, Phase


class Mark(NamedTuple):
    """A phase begins, or a module's forward begins or ends."""

    time_ns: int
    kind: EventKind
    ref: int  # index of the phase, or of the module


class Claim(NamedTuple):
    """The storage that is now at an address has a role."""

    time_ns: int
    address: int
    owner: Owner
    shape: tuple[int, ...]
    dtype: str
    on_host: bool  # it stays in host memory whatever the device (an optimizer's step count)


class Gone(NamedTuple):
    """A storage in host memory was seen at an address, and was gone later."""

    seen_ns: int
    gone_ns: int
    address: int


# What the device and the process held, as in `Sample`: allocated, its peak, reserved, used of the device, resident.
Counters = tuple[int | None, int | None, int | None, int | None, int | None]


class Marks:
    """All of one run; `read` reads the device's counters, and the time is added here."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self.phases: list[Phase] = []
        self.marks: list[Mark] = []
        self.claims: list[Claim] = []
        self.gone: list[Gone] = []
        self.readings: list[tuple[int, Counters]] = []  # each with its time, in nanoseconds

    def begin_phase(self, phase: Phase) -> None:
        """Begin `phase`, to which what happens from here on belongs."""
        self.reading()
        self.phases.append(phase)
        self.marks.append(Mark(time.time_ns(), EventKind.PHASE, len(self.phases) - 1))

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Note when `storage` is gone: if another thread lets go of it, the profiler does not see that."""
        seen_ns, address, gone = time.time_ns(), storage.data_ptr(), self.gone
        # torch keeps the Python object of a storage for as long as the storage itself.
        weakref.finalize(storage, lambda: gone.append(Gone(seen_ns, time.time_ns(), address))).atexit = False

    def reading(self) -> None:
        """Read the counters."""
        # Its time is that of its end: what it synchronised with has happened.
        values = self._read()
        self.readings.append((time.time_ns(), values))
