"""Processes of ranks that run together: forked from this process, each in its own process group.

The processes are forked after torch is imported, so that torch's memory is shared, and each has a connection to this
process, where the ranks exchange messages (exchange.py). A stopped process that does not end within some seconds is
killed with its children; if this process ends, the ranks' processes end too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch

from memprof.device.host import available_bytes
from memprof.errors import MemprofError, UsageError
from memprof.monitor.probe import remove_refusal_files
from memprof.script.exchange import PEER, Exchange
from memprof.script.stop import EndReason, StopRun
from memprof.serving.budget import EngineBudget
from memprof.units import format_bytes
from memprof.virtual.peers.channel import Channel

# Seconds that a rank may wait for a running rank: as long as NCCL's watchdog waits (kProcessGroupNCCLDefaultTimeout of
# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp).
MAX_WAIT_SECONDS = 600.0
_ERROR_SECONDS = 3.0  # seconds for a running rank to react to another rank's error
_EXIT_SECONDS = 20.0  # seconds for a rank to end after a stop
# Host memory of a small rank: the proportional set size of 16 ranks of `fsdp2` of
# tests/programs/parallel.py minus that of 2 ranks, per rank, under torch 2.13.
HOST_BYTES_PER_RANK = 106 << 20
_IDLE_CPU_SECONDS = 1.0  # CPU time that ranks use while they wait
# Seconds for a rank's children to end after the rank: as long as Python's resource tracker takes to unlink
# shared memory.
_CLEANUP_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_INTERRUPTED_CODE = 130


@dataclass(frozen=True, slots=True)
class RankResult:
    """Picklable result of a rank's process."""

    ended: EndReason
    exit_code: int
    result: Any = None
    traceback: str = ""  # a traceback, where it failed
    # memprof's error: class, problem, value and hint.
    error: tuple[type[MemprofError], str, Any, str | None] | None = None
    engine: EngineBudget | None = None  # of the inference engine that it has started


def check_host_memory(num_ranks: int) -> None:
    """Raise UsageError if `num_ranks` processes do not fit this machine's host memory."""
    free_bytes = available_bytes()
    if free_bytes is not None and num_ranks * HOST_BYTES_PER_RANK > free_bytes:
        raise UsageError(
            f"{num_ranks} ranks together take {format_bytes(num_ranks * HOST_BYTES_PER_RANK)} of host memory or more",
            value=f"{format_bytes(free_bytes)} are free",
            hint="name some of them (--ranks 0,1), or run one alone (--rank)",
        )


class _Process:
    """Process of one rank."""

    def __init__(self, rank: int, pid: int, connection: Connection) -> None:
        self.rank, self.pid, self.connection = rank, pid, connection
        self.result: RankResult | None = None
        self.status: int | None = None  # status by `waitpid`; None: running

    def has_ended(self, *, wait: bool = False) -> bool:
        """Return whether the process has ended, after waiting for it if `wait`; forked children may still run."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def signal(self, signal_number: int) -> None:
        """Send the signal `signal_number` to the process group: the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal_number)


def run_ranks_together(
    ranks: Sequence[int],
    size: int,
    run_rank: Callable[[Channel], RankResult],
    *,
    max_wait_seconds: float = MAX_WAIT_SECONDS,
    step_wait_seconds: float = MAX_WAIT_SECONDS,
) -> tuple[dict[int, RankResult], MemprofError | None]:
    """Run `run_rank` in a forked process for each of `ranks`; these processes exchange messages.

    Args:
        ranks: the ranks to run.
        size: number of ranks of the program, including those that do not run.
        run_rank: function that is called in each process, with the channel to the other ranks.
        max_wait_seconds: seconds that a rank may wait for a running rank.
        step_wait_seconds: seconds after which a rank that waits after its last step makes another, for other ranks.

    Returns:
        The result of each rank that returned one, and the error between ranks, if any.
    """
    processes: list[_Process] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for rank in ranks:
            parent_end, child_end = Pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            with _block_sigterm():
                pid = os.fork()
                if pid == 0:
                    for other in [process.connection for process in processes] + [parent_end]:
                        other.close()
                    _run_child(child_end, rank, ranks, size, run_rank)
                processes.append(_Process(rank, pid, parent_end))
            child_end.close()
            with contextlib.suppress(OSError):  # the child may have set its group, or have ended
                os.setpgid(pid, pid)
        return _exchange_until_end(processes, max_wait_seconds, step_wait_seconds)
    finally:
        for process in processes:
            if not process.has_ended():
                os.kill(process.pid, signal.SIGKILL)
                process.has_ended(wait=True)
            process.signal(signal.SIGTERM)
            process.connection.close()
        deadline = time.monotonic() + _CLEANUP_SECONDS
        while _has_live_process({process.pid for process in processes}) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in processes:
            process.signal(signal.SIGKILL)
            remove_refusal_files(process.pid)
        signal.signal(signal.SIGTERM, previous_handler)


@contextlib.contextmanager
def _block_sigterm() -> Iterator[None]:
    """Context manager: block SIGTERM, because an exception of its handler would be lost in a function run by fork."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _run_child(
    connection: Connection, rank: int, ranks: Sequence[int], size: int, run_rank: Callable[[Channel], RankResult]
) -> NoReturn:
    code, pid = 1, os.getpid()
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        with contextlib.suppress(OSError, AttributeError):  # Linux
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed()
        torch.set_num_threads(1)  # as torchrun sets it; a thread pool does not survive a fork
        channel = Channel(connection, rank, ranks, size)
        channel.on_stop = _raise_stop

        def handle_sigterm(number: int, frame: Any) -> NoReturn:
            if os.getpid() != pid:  # a child that the program has forked
                os._exit(128 + number)
            channel.stop_reason = PEER
            _raise_stop(PEER)

        signal.signal(signal.SIGTERM, handle_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        result = run_rank(channel)
        if os.getpid() == pid:  # not in a child that the program has forked
            code = 0
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for stream in (sys.stdout, sys.stderr):  # before the last message
                with contextlib.suppress(Exception):
                    stream.flush()
            channel.send("ended", result)
    except KeyboardInterrupt:  # before the program has begun, or after its end
        code = _INTERRUPTED_CODE
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _raise_stop(reason: str) -> NoReturn:
    raise StopRun(EndReason(reason))


def _exchange_until_end(
    processes: Sequence[_Process], max_wait_seconds: float, step_wait_seconds: float
) -> tuple[dict[int, RankResult], MemprofError | None]:
    process_by_rank = {process.rank: process for process in processes}
    processes_by_connection = {process.connection: process for process in processes}
    wait_starts: dict[int, float] = {}

    def reply(rank: int, reply_kind: str, answer: Any) -> None:
        wait_starts.pop(rank, None)
        with contextlib.suppress(OSError):
            process_by_rank[rank].connection.send_bytes(pickle.dumps((reply_kind, answer)))

    idle_timer = _IdleTimer(processes)
    exchange = Exchange([process.rank for process in processes], reply)
    escalation = _signal_overdue(exchange, processes_by_connection)
    while processes_by_connection:
        try:
            for connection in wait(list(processes_by_connection), timeout=1.0):
                assert isinstance(connection, Connection)
                process = processes_by_connection[connection]
                idle_timer.restart()
                try:
                    kind, *arguments = pickle.loads(connection.recv_bytes())
                except (OSError, EOFError):
                    del processes_by_connection[connection]
                    _handle_death(process, exchange)
                    continue
                if kind == "ended":
                    del processes_by_connection[connection]
                    process.result = arguments[0]
                    _handle_end(process, arguments[0], exchange)
                else:
                    exchange.handle_message(process.rank, kind, *arguments)
                    if process.rank in exchange.waits:
                        wait_starts[process.rank] = time.monotonic()
            for connection, process in list(processes_by_connection.items()):
                if process.has_ended() and not connection.poll():
                    del processes_by_connection[connection]
                    _handle_death(process, exchange)
            for rank, start in list(wait_starts.items()):
                rank_wait = exchange.waits.get(rank)
                if rank_wait is None or not exchange.running_ranks:
                    continue
                if rank_wait.kind == "step" and time.monotonic() - start > step_wait_seconds:
                    exchange.resume_steps()
                elif rank_wait.kind != "step" and time.monotonic() - start > max_wait_seconds:
                    exchange.fail_overdue(rank, max_wait_seconds)
            if exchange.stop_reason is None and idle_timer.is_idle_for(max_wait_seconds):
                exchange.fail(
                    f"no rank has done anything for {max_wait_seconds / 60:.0f} minutes",
                    "see what they wait for: what other processes of the program would send does not come",
                )
            next(escalation)
        except KeyboardInterrupt:
            exchange.stop(EndReason.INTERRUPTED.value)
            for process in processes_by_connection.values():
                process.signal(signal.SIGINT)
    return {process.rank: process.result for process in processes if process.result is not None}, exchange.problem


def _has_live_process(groups: Set[int]) -> bool:
    """Return whether a process of these process groups runs, by /proc; False on systems without it."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, group = entry.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(group) in groups:
                return True
    return False


class _IdleTimer:
    """Timer of the seconds in which ranks neither send messages nor compute, because they wait for other events."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes
        self._cpu_seconds = 0.0
        self._last_activity = time.monotonic()

    def restart(self) -> None:
        """Restart the timer, because a rank has sent a message."""
        self._last_activity = time.monotonic()

    def is_idle_for(self, seconds: float) -> bool:
        """Return whether no rank has sent a message or used the CPU for `seconds`."""
        if time.monotonic() - self._last_activity < seconds:
            return False
        cpu_seconds = sum(_get_cpu_seconds(process.pid) for process in self._processes)
        if cpu_seconds > self._cpu_seconds + _IDLE_CPU_SECONDS:
            self._cpu_seconds = cpu_seconds
            self.restart()
            return False
        return True


def _get_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that process `pid` has used; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def _signal_overdue(exchange: Exchange, processes_by_connection: dict[Connection, _Process]) -> Iterator[None]:
    """Generator, advanced periodically: send SIGTERM, then SIGKILL, to ranks that do not end after a stop."""
    while exchange.stop_reason is None:
        yield
    has_error = exchange.problem or exchange.stop_reason == PEER
    for number, seconds in ((signal.SIGTERM, _ERROR_SECONDS), (signal.SIGKILL, _EXIT_SECONDS)):
        deadline = time.monotonic() + (seconds if has_error else MAX_WAIT_SECONDS)
        while time.monotonic() < deadline:
            yield
        for process in processes_by_connection.values():
            process.signal(number)
    while True:
        yield


def _handle_end(process: _Process, result: RankResult, exchange: Exchange) -> None:
    if result.ended in (EndReason.ERROR, EndReason.NOT_SIMULATED, EndReason.REFUSED) or result.exit_code:
        exchange.stop(PEER)
    elif result.ended in (EndReason.TIMEOUT, EndReason.INTERRUPTED):
        exchange.stop(result.ended.value)
    exchange.record_end(process.rank, "has ended")


def _handle_death(process: _Process, exchange: Exchange) -> None:
    process.has_ended(wait=True)
    code = os.waitstatus_to_exitcode(process.status or 0)
    if code == _INTERRUPTED_CODE:
        exchange.stop(EndReason.INTERRUPTED.value)
    name = signal.Signals(-code).name if code < 0 else ""
    description = f"was killed by {name}" if name else f"ended without a word, with exit code {code}"
    if exchange.stop_reason is None:
        hint = "the kernel kills what takes the memory of others: run fewer ranks (--ranks 0,1), or one alone (--rank)"
        exchange.fail(
            f"rank {process.rank} {description}",
            hint if name == "SIGKILL" else "run it alone: --rank " + str(process.rank),
        )
    exchange.record_end(process.rank, description)
