"""Reports of the probes in the command's processes, received by a thread and collected for each sample."""

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
    """A memory counter: current value, peak reported by torch, peak since the last sample, highest value so far."""

    current: int = 0
    cumulative_peak: int = 0
    interval_peak: int = 0
    highest: int = 0

    def add(self, current: int, cumulative_peak: int) -> None:
        """Update the counter from a report. If `cumulative_peak` is lower than before, the program has reset torch's
        peak, and it is the peak since then."""
        new_peak = cumulative_peak if cumulative_peak != self.cumulative_peak else 0
        self.interval_peak = max(self.interval_peak, current, new_peak)
        self.highest = max(self.highest, current, cumulative_peak)
        self.current, self.cumulative_peak = current, cumulative_peak

    def begin_interval(self) -> None:
        """Begin the next interval, whose peak starts at the current value."""
        self.interval_peak = self.current


@dataclass(slots=True)
class _Device:
    """Counters of one GPU, as a process has reported them."""

    gpu: dict[str, Any]
    allocated: _Counter = field(default_factory=_Counter)
    reserved: _Counter = field(default_factory=_Counter)
    requested_bytes: int | None = None
    num_alloc_retries: int = 0
    num_ooms: int = 0

    def add(self, counters: dict[str, Any]) -> None:
        """Update the state from the `counters` of one report."""
        self.allocated.add(*counters["allocated_bytes"])
        self.reserved.add(*counters["reserved_bytes"])
        if "requested_bytes" in counters:
            self.requested_bytes = counters["requested_bytes"][0]
        self.num_alloc_retries, self.num_ooms = counters["num_alloc_retries"], counters["num_ooms"]

    def to_allocator(self, index: int) -> Allocator:
        """Return the state at the last report; `index` is CUDA's index of the GPU."""
        allocated, reserved = self.allocated, self.reserved
        return Allocator(
            device=index, name=str(self.gpu.get("name", "")), uuid=str(self.gpu.get("uuid", "")),
            total_bytes=int(self.gpu.get("total_bytes", 0)), requested_bytes=self.requested_bytes,
            allocated_bytes=allocated.current, reserved_bytes=reserved.current,
            interval_peak_allocated_bytes=allocated.interval_peak, interval_peak_reserved_bytes=reserved.interval_peak,
            max_allocated_bytes=allocated.highest, max_reserved_bytes=reserved.highest,
            num_alloc_retries=self.num_alloc_retries, num_ooms=self.num_ooms,
        )  # fmt: skip


@dataclass(slots=True)
class Reporter:
    """State of one process that has initialized CUDA, from the messages of its probe."""

    start_time: float
    rank: int | None
    devices: dict[int, _Device] = field(default_factory=dict)
    has_reported: bool = True  # since the last sample
    error: str = ""  # why the allocator cannot be read any more

    def add(self, message: dict[str, Any]) -> None:
        """Update the state from a message of the probe."""
        self.has_reported = True
        self.error = str(message.get("error", ""))
        for index, counters in message["devices"].items():
            self.devices.setdefault(int(index), _Device(message["gpus"].get(index, {}))).add(counters)

    def sample(self) -> tuple[bool, int | None, tuple[Allocator, ...]]:
        """Return whether a message came since the last sample, the rank, and the allocators; begin a new interval."""
        allocators = tuple(device.to_allocator(index) for index, device in sorted(self.devices.items()))
        sample = (self.has_reported, self.rank, allocators)
        self.has_reported = False
        for device in self.devices.values():
            device.allocated.begin_interval()
            device.reserved.begin_interval()
        return sample


class Reports:
    """Context manager: receiver of the reports from the probes in one command's processes."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._reporter_by_pid: dict[int, Reporter] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._note = ""
        self._folder = ""
        self._socket: socket.socket | None = None

    def __enter__(self) -> Reports:
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
        """Start the thread that receives reports; it blocks the signals that this thread blocks."""
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
        """Return errors in receiving reports or reading an allocator, one line each."""
        with self._lock:
            errors = sorted({reporter.error for reporter in self._reporter_by_pid.values()} - {""})
        notes = [self._note, *(f"the command's allocator cannot be read: {error}" for error in errors)]
        return list(filter(None, notes))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that load the probe in the command's Python processes."""
        if self._socket is None:
            return {}
        path = python_path(os.environ.get("PYTHONPATH"))
        return {"PYTHONPATH": path, SOCKET: self._address, INTERVAL: str(self._interval_seconds)}

    def drain(self) -> None:
        """Wait until all messages sent so far are received, and stop listening."""
        if self._socket is None or self._thread is None or not self._thread.is_alive():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(_END, self._address)
        self._thread.join()

    def collect(self) -> dict[int, tuple[bool, int | None, tuple[Allocator, ...]]]:
        """Return, by pid, whether a report came since the last call, the rank, and the allocators; begin a new
        interval."""
        with self._lock:
            return {pid: reporter.sample() for pid, reporter in self._reporter_by_pid.items()}

    def _receive_messages(self, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := receiver.recv(_MAX_MESSAGE_BYTES)) != _END:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # not from a probe
                    self._add_message(json.loads(data))

    def _add_message(self, message: dict[str, Any]) -> None:
        pid, start_time = int(message["pid"]), float(message["started"])
        rank = message.get("rank")
        with self._lock:
            reporter = self._reporter_by_pid.get(pid)
            if reporter is None or reporter.start_time != start_time:  # a reused pid, or a new program after exec
                reporter = Reporter(start_time, int(rank) if rank and rank.isdecimal() else None)
                self._reporter_by_pid[pid] = reporter
            reporter.add(message)
