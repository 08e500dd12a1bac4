"""Loop of `memprof monitor`: start a command, and sample, show and log memory use until the command ends."""

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
from memprof.monitor.command import RunningCommand, Signals
from memprof.monitor.log import Log
from memprof.monitor.reports import Reports
from memprof.monitor.sample import MonitorSample, Peaks, WatchedProcess, csv_header, csv_row


class View(Protocol):
    """View that shows the samples (`memprof.report.terminal.monitor`)."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Show a sample."""

    def pause(self) -> None:
        """Restore the terminal, for other programs to use (Ctrl-Z)."""

    def close(self, outcome: MonitorOutcome) -> None:
        """Close the view and show the outcome."""


@dataclass(frozen=True, slots=True)
class MonitorOutcome:
    """Outcome of a watched command: exit code, peaks and notes."""

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
        signals.block()
        if reports is not None:
            reports.listen()
        sampler = _Sampler(stack.enter_context(open_nvml()), reports, command)
        sample = sampler.sample()
        gpu_indices = [gpu.index for gpu in sample.gpus]
        peaks = Peaks()
        file = Log(log, csv_header(gpu_indices))
        stack.callback(file.close)
        stack.callback(view.pause)  # whatever happens, the terminal is released

        def record(sample: MonitorSample) -> None:
            peaks.add(sample)
            file.write(csv_row(sample, peaks, gpu_indices))
            view.show(replace(sample, notes=tuple(filter(None, (*sample.notes, file.note)))), peaks)

        record(sample)
        end_signal = 0
        if not once and (command is not None or gpu_indices):
            end_signal = _record_until_end(
                command, signals, view, interval, record_sample=lambda: record(sampler.sample())
            )
        if reports is not None:
            reports.drain()
            # A last sample with the peaks in the command's last messages; the command has ended.
            record(sampler.sample())
            peaks.resident_bytes = max(peaks.resident_bytes, command.read_peak_resident_bytes() if command else 0)
        file.close()
        code = command.exit_code if command is not None else int(not gpu_indices)
        if end_signal not in (0, signal.SIGINT):
            code = 128 + end_signal
        text, ending = (command.command_line, command.describe_end()) if command is not None else ("", "")
        outcome = MonitorOutcome(code or 0, text, ending, sampler.elapsed, peaks, (file.note,) if file.note else ())
        view.close(outcome)
    return outcome


def _record_until_end(
    command: RunningCommand | None, signals: Signals, view: View, interval: float, record_sample: Callable[[], None]
) -> int:
    """Record samples until the command ends, or without a command until a signal; return that signal, or 0."""
    end_signal = 0

    def handle_signal(signal_info: signal.struct_siginfo) -> bool:
        """Handle a received signal; return whether to stop waiting for the next sample."""
        nonlocal end_signal
        if signal_info.si_signo == signal.SIGTSTP:
            view.pause()
            os.kill(os.getpid(), signal.SIGSTOP)  # returns after SIGCONT
            return True
        if command is not None:
            command.forward_signal(signal_info)
            return command.exit_code is not None
        if signal_info.si_signo != signal.SIGCHLD:
            end_signal = signal_info.si_signo
        return bool(end_signal)

    next_sample_time = time.monotonic() + interval
    while True:
        # Checked before each wait: a command that ended before signals were blocked sends no SIGCHLD.
        if command is None or command.exit_code is None:
            while (remaining := next_sample_time - time.monotonic()) > 0:
                signal_info = signals.wait(remaining)
                if signal_info is not None and handle_signal(signal_info):
                    break
        if end_signal or (command is not None and command.exit_code is not None):
            return end_signal
        record_sample()
        # Samples are at multiples of the interval from the first sample; a missed time is skipped.
        next_sample_time += interval
        if next_sample_time < time.monotonic():
            next_sample_time = time.monotonic() + interval


class _Sampler:
    """Sampler of the state of the GPUs and of the command's processes."""

    def __init__(self, nvml: Nvml, reports: Reports | None, command: RunningCommand | None) -> None:
        self._nvml = nvml
        self._reports = reports
        self._tree = ProcessTree(command.pid) if command is not None else None
        self._start_time = time.monotonic()
        self._process_names: dict[int, str] = {}

    @property
    def elapsed(self) -> float:
        """Return the seconds since this sampler was created."""
        return time.monotonic() - self._start_time

    def sample(self) -> MonitorSample:
        """Return a sample of the current state."""
        nvml_sample = self._nvml.read()
        notes = [*nvml_sample.notes, *(note for gpu in nvml_sample.gpus for note in gpu.notes)]
        if self._reports is not None:
            notes += self._reports.notes()
        return MonitorSample(time.time(), self.elapsed, nvml_sample.gpus, self._sample_processes(), tuple(notes))

    def _sample_processes(self) -> tuple[WatchedProcess, ...]:
        if self._tree is None or self._reports is None:
            return ()
        reports_by_pid = self._reports.collect()
        process_by_pid = {process.pid: process for process in self._tree.read()}
        self._process_names |= {process.pid: process.name for process in process_by_pid.values()}
        watched_processes = []
        # Processes that sent a report and ended since the last sample count once more.
        reporting_pids = {pid for pid, (has_reported, *_) in reports_by_pid.items() if has_reported}
        for pid in sorted(process_by_pid.keys() | reporting_pids):
            process = process_by_pid.get(pid)
            name, resident = self._process_names.get(pid, f"process {pid}"), process.resident_bytes if process else 0
            _, rank, allocators = reports_by_pid.get(pid, (False, None, ()))
            peak_bytes = process.peak_resident_bytes if process else None
            watched_processes.append(WatchedProcess(pid, name, resident, peak_bytes, rank, allocators))
        return tuple(watched_processes)
