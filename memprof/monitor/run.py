"""Watch loop of `memprof monitor`: start the command; sample, show and log every interval until the command ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from memprof.device.nvml import Nvml
from memprof.device.processes import ProcessTree
from memprof.monitor.command import RunningCommand, Signals, now
from memprof.monitor.log import Log
from memprof.monitor.reports import Reports
from memprof.monitor.sample import MonitorSample, Peaks, WatchedProcess, csv_header, csv_row


class View(Protocol):
    """View of the samples (`memprof.report.terminal.monitor`)."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Show a sample."""

    def pause(self) -> None:
        """Leave the terminal to other programs (Ctrl-Z)."""

    def close(self, outcome: MonitorOutcome) -> None:
        """Close the view and show the outcome."""


@dataclass(frozen=True, slots=True)
class MonitorOutcome:
    """End of a watched command."""

    # The command's exit code, 128 + n if signal n killed it; without a command 0, 1 without a GPU, or the signal's.
    exit_code: int
    command: str  # as a shell command line; empty without a command
    ending: str
    elapsed: float  # seconds
    peaks: Peaks
    notes: tuple[str, ...]  # data that could not be read or written at the end, one line each


def monitor(
    arguments: Sequence[str],
    view: View,
    *,
    interval: float = 1.0,
    log: Path | None = None,
    once: bool = False,
    open_nvml: Callable[[], Nvml] = Nvml,
) -> MonitorOutcome:
    """Watch the GPUs and the command, if any, until the command ends; without a command, until a signal.

    Every `interval` seconds a sample is shown, and written into the CSV file `log`; with `once` there is one sample.
    Raises CommandError if the command cannot be started.
    """
    with ExitStack() as stack:
        reports = stack.enter_context(Reports(interval)) if arguments else None
        signals = stack.enter_context(Signals())
        command = RunningCommand(arguments, reports.environment()) if reports is not None else None
        # A started program inherits blocked signals, and a thread that does not block them takes them away from `wait`:
        # so the command comes before this, and whatever may begin a thread after it.
        signals.hold()
        if reports is not None:
            reports.listen()
        watch = _Sampler(stack.enter_context(open_nvml()), reports, command)
        first = watch.sample()
        gpus = [gpu.index for gpu in first.gpus]
        peaks = Peaks()
        file = Log(log, csv_header(gpus))
        stack.callback(file.close)
        stack.callback(view.pause)  # whatever happens, the terminal is released

        def record(sample: MonitorSample) -> None:
            peaks.add(sample)
            file.write(csv_row(sample, peaks, gpus))
            view.show(replace(sample, notes=tuple(filter(None, (*sample.notes, file.note)))), peaks)

        record(first)
        stopped_by = 0
        if not once and (command is not None or first.gpus):
            stopped_by = _record_until_end(watch, command, signals, view, interval, record)
        if reports is not None:
            reports.drain()
            # A last sample with the peaks in the command's last messages; the command has ended.
            record(watch.sample())
            peaks.resident_bytes = max(peaks.resident_bytes, command.peak_resident_bytes() if command else 0)
        file.close()
        code = command.exit_code if command is not None else int(not first.gpus)
        if command is None and stopped_by and stopped_by != signal.SIGINT:
            code = 128 + stopped_by
        text, ending = (command.text, command.ending()) if command is not None else ("", "")
        outcome = MonitorOutcome(code or 0, text, ending, watch.elapsed, peaks, (file.note,) if file.note else ())
        view.close(outcome)
    return outcome


def _record_until_end(
    watch: _Sampler,
    command: RunningCommand | None,
    signals: Signals,
    view: View,
    interval: float,
    record: Callable[..., None],
) -> int:
    """Record samples until the command ends, or without a command until a signal; return that signal, or 0."""
    received = 0

    def handle(signal_info: signal.struct_siginfo) -> bool:
        nonlocal received
        if signal_info.si_signo == signal.SIGTSTP:
            view.pause()
            os.kill(os.getpid(), signal.SIGSTOP)  # returns after SIGCONT
            return True
        if command is not None:
            command.pass_on(signal_info)
            return command.exit_code is not None
        if signal_info.si_signo != signal.SIGCHLD:
            received = signal_info.si_signo
        return bool(received)

    due = now() + interval
    while True:
        # Checked before each wait: a command that ended before signals were blocked sends no SIGCHLD.
        if command is None or command.exit_code is None:
            while (remaining := due - now()) > 0:
                signal_info = signals.wait(remaining)
                if signal_info is not None and handle(signal_info):
                    break
        if received or (command is not None and command.exit_code is not None):
            return received
        record(watch.sample())
        # Samples are at multiples of the interval from the first sample; a missed time is skipped.
        due += interval
        if due < now():
            due = now() + interval


class _Sampler:
    """Collector of samples of the GPUs and the command."""

    def __init__(self, nvml: Nvml, reports: Reports | None, command: RunningCommand | None) -> None:
        self._nvml = nvml
        self._reports = reports
        self._tree = ProcessTree(command.pid) if command is not None else None
        self._start_time = now()
        self._names: dict[int, str] = {}

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return now() - self._start_time

    def sample(self) -> MonitorSample:
        """Return a sample as of now."""
        reading = self._nvml.read()
        notes = [*reading.notes, *(note for gpu in reading.gpus for note in gpu.notes)]
        if self._reports is not None:
            notes += self._reports.notes()
        return MonitorSample(time.time(), self.elapsed, reading.gpus, self._processes(), tuple(notes))

    def _processes(self) -> tuple[WatchedProcess, ...]:
        if self._tree is None or self._reports is None:
            return ()
        reports_by_pid = self._reports.collect()
        running = {process.pid: process for process in self._tree.read()}
        self._names |= {process.pid: process.name for process in running.values()}
        watched = []
        # Processes that sent a report and ended since the last sample count once more.
        for pid in sorted(running.keys() | {pid for pid, (heard, *_) in reports_by_pid.items() if heard}):
            process = running.get(pid)
            name, resident = self._names.get(pid, f"process {pid}"), process.resident_bytes if process else 0
            _, rank, allocators = reports_by_pid.get(pid, (False, None, ()))
            peak = process.peak_resident_bytes if process else None
            watched.append(WatchedProcess(pid, name, resident, peak, rank, allocators))
        return tuple(watched)
