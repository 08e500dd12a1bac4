"""What is noted while a measured run goes on: phases, modules, owners and samples, each with its time.

Noting is appending to a list: what a run costs more for being measured is mostly the profiler's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from memprof.trace.events import EventKind, Owner, Phase


class Mark(NamedTuple):
    """A phase begins, or a module's forward begins or ends."""

    time_ns: int
    kind: EventKind
    ref: int
    """Index of the phase, or of the module."""


class Claim(NamedTuple):
    """The storage that is now at an address has a role."""

    time_ns: int
    address: int
    owner: Owner
    shape: tuple[int, ...]
    dtype: str
    on_host: bool
    """It stays in host memory whatever the device (an optimizer's step count)."""


Counters = tuple[int | None, int | None, int | None, int | None, int | None]
"""What the device and the process held, as in `Sample`: allocated, its peak, reserved, used of the device, resident."""


class Marks:
    """All of one run; `read` reads the device's counters, and the time is added here."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self.phases: list[Phase] = []
        self.marks: list[Mark] = []
        self.claims: list[Claim] = []
        self.readings: list[tuple[int, Counters]] = []
        """Each with its time, in nanoseconds."""

    def begin_phase(self, phase: Phase) -> None:
        """From here on, what happens belongs to `phase`."""
        self.reading()
        self.phases.append(phase)
        self.marks.append(Mark(time.time_ns(), EventKind.PHASE, len(self.phases) - 1))

    def module(self, kind: EventKind, module: int) -> None:
        """A module's forward begins or ends."""
        self.marks.append(Mark(time.time_ns(), kind, module))

    def claim(self, address: int, owner: Owner, shape: tuple[int, ...], dtype: str, *, on_host: bool = False) -> None:
        """The storage at `address` has a role from now on."""
        self.claims.append(Claim(time.time_ns(), address, owner, shape, dtype, on_host))

    def reading(self) -> None:
        """Read the counters."""
        # Its time is that of its end: what it synchronised with has happened.
        values = self._read()
        self.readings.append((time.time_ns(), values))
