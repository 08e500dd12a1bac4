"""Reports of the probe inside the command's processes: received by a thread, kept by process until the next sample."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from dataclasses import dataclass, field
from typing import Any

from memprof.monitor.probe import python_path
from memprof.monitor.probe.sitecustomize import INTERVAL, SOCKET
from memprof.monitor.sample import Allocator

_LARGEST = 1 << 16
_LONGEST_FOLDER = 80
_END = b"end"


@dataclass(slots=True)
class _Counter:
    """One cumulative counter: current value, the highest that it says, and the highest since the last sample."""

    current: int = 0
    cumulative_peak: int = 0
    interval_peak: int = 0
    highest: int = 0

    def add(self, current: int, cumulative_peak: int) -> None:
        """Add a reading. A cumulative peak that has fallen was reset by the program, and says what was since."""
        new_peak = cumulative_peak if cumulative_peak != self.cumulative_peak else 0
        self.interval_peak = max(self.interval_peak, current, new_peak)
        self.highest = max(self.highest, current, cumulative_peak)
        self.current, self.cumulative_peak = current, cumulative_peak

    def next_interval(self) -> None:
        """Begin the next interval: its peak starts at what is live now."""
        self.interval_peak = self.current


@dataclass(slots=True)
class _Device:
    gpu: dict[str, Any]
    allocated: _Counter = field(default_factory=_Counter)
    reserved: _Counter = field(default_factory=_Counter)
    requested: int | None = None
    num_alloc_retries: int = 0
    num_ooms: int = 0


@dataclass(slots=True)
class Reporter:
    """One process that has initialised CUDA."""

    started: float
    rank: int | None
    devices: dict[int, _Device] = field(default_factory=dict)
    heard: bool = True  # since the last sample
    error: str = ""  # why its allocator can be read no more

    def allocators(self) -> tuple[Allocator, ...]:
        """Return the allocators as of the last message."""
        return tuple(
            Allocator(
                device=index,
                name=str(device.gpu.get("name", "")),
                uuid=str(device.gpu.get("uuid", "")),
                total_bytes=int(device.gpu.get("total_bytes", 0)),
                requested_bytes=device.requested,
                allocated_bytes=device.allocated.current,
                reserved_bytes=device.reserved.current,
                interval_peak_allocated_bytes=device.allocated.interval_peak,
                interval_peak_reserved_bytes=device.reserved.interval_peak,
                max_allocated_bytes=device.allocated.highest,
                max_reserved_bytes=device.reserved.highest,
                num_alloc_retries=device.num_alloc_retries,
                num_ooms=device.num_ooms,
            )
            for index, device in sorted(self.devices.items())
        )

    def add(self, message: dict[str, Any]) -> None:
        """Take a message in."""
        self.heard = True
        self.error = str(message.get("error", ""))
        for index, counters in message["devices"].items():
            device = self.devices.setdefault(int(index), _Device(message["gpus"].get(index, {})))
            device.allocated.add(*counters["allocated_bytes"])
            device.reserved.add(*counters["reserved_bytes"])
            if "requested_bytes" in counters:
                device.requested = counters["requested_bytes"][0]
            device.num_alloc_retries = counters["num_alloc_retries"]
            device.num_ooms = counters["num_ooms"]

    def next_interval(self) -> None:
        """Begin the next interval, once the sample is taken."""
        self.heard = False
        for device in self.devices.values():
            device.allocated.next_interval()
            device.reserved.next_interval()


class Reports:
    """Listens to the probes of one command: a context manager."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._reporters: dict[int, Reporter] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._note = ""

    def __enter__(self) -> Reports:
        self._folder = ""
        self._socket: socket.socket | None = None
        try:
            # The address of a socket holds 107 bytes.
            short = len(os.fsencode(tempfile.gettempdir())) < _LONGEST_FOLDER
            self._folder = tempfile.mkdtemp(prefix="memprof-", dir=None if short else "/tmp")
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            listening.bind(self._address)
            self._socket = listening
        except (OSError, AttributeError) as error:
            self._note = f"allocator statistics cannot be received: {error}"
        return self

    def listen(self) -> None:
        """Begin to take messages in. A thread begins here, with the signals that are blocked now."""
        if self._socket is not None:
            self._thread = threading.Thread(target=self._listen, args=(self._socket,), daemon=True)
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self.drain()
        if self._socket is not None:
            self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _address(self) -> str:
        return os.path.join(self._folder, "reports")

    def notes(self) -> list[str]:
        """Why nothing can be heard, or an allocator cannot be read; empty if all is well."""
        with self._lock:
            errors = sorted({reporter.error for reporter in self._reporters.values() if reporter.error})
        found = [f"the command's allocator cannot be read: {error}" for error in errors]
        return [self._note, *found] if self._note else found

    def environment(self) -> dict[str, str]:
        """Return what the command's environment must have, beside what it is started with."""
        if self._socket is None:
            return {}
        path = python_path(os.environ.get("PYTHONPATH"))
        return {"PYTHONPATH": path, SOCKET: self._address, INTERVAL: str(self._interval)}

    def drain(self) -> None:
        """Return when everything that was sent until now has been taken in, and stop listening."""
        if self._socket is None or self._thread is None or not self._thread.is_alive():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(_END, self._address)
        self._thread.join()

    def collect(self) -> dict[int, tuple[bool, int | None, tuple[Allocator, ...]]]:
        """By pid: whether it was heard of since the last call, its rank, and its allocators; begins a new interval."""
        found = {}
        with self._lock:
            for pid, reporter in self._reporters.items():
                found[pid] = (reporter.heard, reporter.rank, reporter.allocators())
                reporter.next_interval()
        return found

    def _listen(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := listening.recv(_LARGEST)) != _END:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # not from a probe
                    self._take(json.loads(data))

    def _take(self, message: dict[str, Any]) -> None:
        pid, started = int(message["pid"]), float(message["started"])
        rank = message.get("rank")
        with self._lock:
            reporter = self._reporters.get(pid)
            if reporter is None or reporter.started != started:  # the number may be used again, or the program replaced
                reporter = Reporter(started, int(rank) if rank and rank.isdecimal() else None)
                self._reporters[pid] = reporter
            reporter.add(message)
