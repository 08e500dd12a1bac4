"""Reports of the probes in the command's processes: received by a thread, kept per process until the next sample."""

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

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_FOLDER_BYTES = 80
_END = b"end"


@dataclass(slots=True)
class _Counter:
    """One counter: current value, reported cumulative peak, peak since the last sample, highest value."""

    current: int = 0
    cumulative_peak: int = 0
    interval_peak: int = 0
    highest: int = 0

    def add(self, current: int, cumulative_peak: int) -> None:
        """Add a report. A lower cumulative peak than before means a reset by the program, and is the peak since that
        reset."""
        new_peak = cumulative_peak if cumulative_peak != self.cumulative_peak else 0
        self.interval_peak = max(self.interval_peak, current, new_peak)
        self.highest = max(self.highest, current, cumulative_peak)
        self.current, self.cumulative_peak = current, cumulative_peak

    def next_interval(self) -> None:
        """Begin the next interval, whose peak starts at the current value."""
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
    """One process that has initialized CUDA."""

    started: float
    rank: int | None
    devices: dict[int, _Device] = field(default_factory=dict)
    heard: bool = True  # whether a message came since the last sample
    error: str = ""  # why the allocator cannot be read any more

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
        """Add a message of the probe."""
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
        """Begin the next interval, after a sample."""
        self.heard = False
        for device in self.devices.values():
            device.allocated.next_interval()
            device.reserved.next_interval()


class Reports:
    """Context manager: receive the reports of one command's probes."""

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
            # A Unix socket's address has at most 107 bytes.
            is_short = len(os.fsencode(tempfile.gettempdir())) < _MAX_FOLDER_BYTES
            self._folder = tempfile.mkdtemp(prefix="memprof-", dir=None if is_short else "/tmp")
            receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            receiver.bind(self._address)
            self._socket = receiver
        except (OSError, AttributeError) as error:
            self._note = f"allocator statistics cannot be received: {error}"
        return self

    def listen(self) -> None:
        """Start the receiving thread, which inherits the currently blocked signals."""
        if self._socket is not None:
            self._thread = threading.Thread(target=self._receive_messages, args=(self._socket,), daemon=True)
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
        """Return errors that prevent reports, or reads of an allocator, one line each; empty without errors."""
        with self._lock:
            errors = sorted({reporter.error for reporter in self._reporters.values() if reporter.error})
        found = [f"the command's allocator cannot be read: {error}" for error in errors]
        return [self._note, *found] if self._note else found

    def environment(self) -> dict[str, str]:
        """Return the variables that the command's environment needs for the probe."""
        if self._socket is None:
            return {}
        path = python_path(os.environ.get("PYTHONPATH"))
        return {"PYTHONPATH": path, SOCKET: self._address, INTERVAL: str(self._interval)}

    def drain(self) -> None:
        """Wait until all messages sent so far are received, and stop listening."""
        if self._socket is None or self._thread is None or not self._thread.is_alive():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(_END, self._address)
        self._thread.join()

    def collect(self) -> dict[int, tuple[bool, int | None, tuple[Allocator, ...]]]:
        """Return by pid: whether a report came since the last call, the rank, and the allocators; begin
        a new interval."""
        found = {}
        with self._lock:
            for pid, reporter in self._reporters.items():
                found[pid] = (reporter.heard, reporter.rank, reporter.allocators())
                reporter.next_interval()
        return found

    def _receive_messages(self, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := receiver.recv(_MAX_MESSAGE_BYTES)) != _END:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # not from a probe
                    self._add_message(json.loads(data))

    def _add_message(self, message: dict[str, Any]) -> None:
        pid, started = int(message["pid"]), float(message["started"])
        rank = message.get("rank")
        with self._lock:
            reporter = self._reporters.get(pid)
            if reporter is None or reporter.started != started:  # a reused pid, or a new program after exec
                reporter = Reporter(started, int(rank) if rank and rank.isdecimal() else None)
                self._reporters[pid] = reporter
            reporter.add(message)
