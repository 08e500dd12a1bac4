"""Processes of ranks that run together: forked here, each in a process group of its own, with clean-up at the end.

The processes are forked after torch is imported, so that torch's memory is shared, and each has a connection to this
process, where the ranks exchange messages (exchange.py). A process that is stopped has some seconds to end, and is then
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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch

from memprof.device.host import available_bytes
from memprof.errors import MemprofError, UsageError
from memprof.script.exchange import PEER, Exchange
from memprof.script.stop import EndReason, StopRun
from memprof.units import format_bytes
from memprof.virtual.peers.channel import Channel
from memprof.virtual.subprocesses import refusal_file_prefix

# Seconds that a rank may wait for one that runs: as long as NCCL's watchdog does (kProcessGroupNCCLDefaultTimeout of
# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp).
MAX_WAIT_SECONDS = 600.0
_ERROR_SECONDS = 3.0  # seconds for a running rank to react to another rank's error
_EXIT_SECONDS = 20.0  # seconds for a rank to end after a stop
# Host memory of a small rank: the proportional set size of 16 ranks of `fsdp2` of
# tests/programs/parallel.py minus that of 2 ranks, per rank, under torch 2.13.
HOST_BYTES_PER_RANK = 106 << 20
_IDLE_CPU_SECONDS = 1.0  # seconds of a processor that ranks use while they wait
# Seconds for a rank's children to end after the rank: as long as Python's resource tracker takes to unlink
# shared memory.
_CLEANUP_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_INTERRUPTED_CODE = 130


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of a rank's process; the fields can be pickled."""

    ended: EndReason
    exit_code: int
    result: Any = None
    traceback: str = ""  # a traceback, where it failed
    # memprof's error: class, problem, value and hint.
    error: tuple[type[MemprofError], str, Any, str | None] | None = None


def check_host_memory(num_ranks: int) -> None:
    """Raise UsageError if `num_ranks` processes do not fit this machine's host memory."""
    free = available_bytes()
    if free is not None and num_ranks * HOST_BYTES_PER_RANK > free:
        raise UsageError(
            f"{num_ranks} ranks together take {format_bytes(num_ranks * HOST_BYTES_PER_RANK)} of host memory or more",
            value=f"{format_bytes(free)} are free",
            hint="name some of them (--ranks 0,1), or run one alone (--rank)",
        )


class _Process:
    """Process of one rank."""

    def __init__(self, rank: int, pid: int, connection: Connection) -> None:
        self.rank, self.pid, self.connection = rank, pid, connection
        self.result: RankResult | None = None
        self.status: int | None = None  # status by `waitpid`; None: running

    def has_ended(self, *, wait: bool = False) -> bool:
        """Return whether the process has ended; its connection may still be open in a forked child."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def run_ranks_together(
    ranks: Sequence[int],
    size: int,
    run_rank: Callable[[Channel], RankResult],
    *,
    max_wait_seconds: float = MAX_WAIT_SECONDS,
    step_wait_seconds: float = MAX_WAIT_SECONDS,
) -> tuple[dict[int, RankResult], MemprofError | None]:
    """Run `run_rank` in a process for each of `ranks`, which can exchange messages.

    Args:
        ranks: the ranks to run.
        size: ranks of the whole program.
        run_rank: function of a process, called with the channel to the others.
        max_wait_seconds: seconds that a rank may wait for another that runs.
        step_wait_seconds: seconds after which a rank that waits at its last step makes another, which others may need.

    Returns:
        The result of each rank, and the error between ranks, if any.
    """
    processes: list[_Process] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for rank in ranks:
            own_end, child_end = Pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            with _block_sigterm():
                pid = os.fork()
                if pid == 0:
                    for other in [one.connection for one in processes] + [own_end]:
                        other.close()
                    _run_child(child_end, rank, ranks, size, run_rank)
                processes.append(_Process(rank, pid, own_end))
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
        end = time.monotonic() + _CLEANUP_SECONDS
        while _has_live_process({process.pid for process in processes}) and time.monotonic() < end:
            time.sleep(0.02)
        for process in processes:
            process.signal(signal.SIGKILL)
            for left in Path(tempfile.gettempdir()).glob(f"{refusal_file_prefix(process.pid)}*"):
                left.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, previous_handler)


@contextlib.contextmanager
def _block_sigterm() -> Iterator[None]:
    """Context manager: block SIGTERM, whose handler's exception would be lost in a function that runs at fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_child(
    connection: Connection, rank: int, ranks: Sequence[int], size: int, run_rank: Callable[[Channel], RankResult]
) -> NoReturn:
    code, process = 1, os.getpid()
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

        def end(number: int, frame: Any) -> NoReturn:
            if os.getpid() != process:  # a child that the program has forked
                os._exit(128 + number)
            channel.stop_reason = PEER
            _raise_stop(PEER)

        signal.signal(signal.SIGTERM, end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        ran = run_rank(channel)
        if os.getpid() == process:  # not in a child that the program has forked
            code = 0
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for stream in (sys.stdout, sys.stderr):  # before the last message
                with contextlib.suppress(Exception):
                    stream.flush()
            channel.send("ended", ran)
    except KeyboardInterrupt:  # before the program has begun, or after its end
        code = _INTERRUPTED_CODE
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _raise_stop(why: str) -> NoReturn:
    raise StopRun(EndReason(why))


def _exchange_until_end(
    processes: Sequence[_Process], max_wait_seconds: float, step_wait_seconds: float
) -> tuple[dict[int, RankResult], MemprofError | None]:
    by_rank = {process.rank: process for process in processes}
    living = {process.connection: process for process in processes}
    since: dict[int, float] = {}

    def reply(rank: int, word: str, answer: Any) -> None:
        since.pop(rank, None)
        with contextlib.suppress(OSError):
            by_rank[rank].connection.send_bytes(pickle.dumps((word, answer)))

    idle_timer = _IdleTimer(processes)
    exchange = Exchange([process.rank for process in processes], reply)
    deadlines = _signal_overdue(exchange, living)
    while living:
        try:
            for line in wait(list(living), timeout=1.0):
                assert isinstance(line, Connection)
                process = living[line]
                idle_timer.restart()
                try:
                    kind, *said = pickle.loads(line.recv_bytes())
                except (OSError, EOFError):
                    del living[line]
                    _handle_death(process, exchange)
                    continue
                if kind == "ended":
                    del living[line]
                    process.result = said[0]
                    _handle_end(process, said[0], exchange)
                else:
                    exchange.handle_message(process.rank, kind, *said)
                    if process.rank in exchange.waiting:
                        since[process.rank] = time.monotonic()
            for line, process in list(living.items()):
                if process.has_ended() and not line.poll():
                    del living[line]
                    _handle_death(process, exchange)
            for rank, begun in list(since.items()):
                waiting = exchange.waiting.get(rank)
                if waiting is None or not exchange.running:
                    continue
                if waiting.kind == "step" and time.monotonic() - begun > step_wait_seconds:
                    exchange.resume_steps()
                elif waiting.kind != "step" and time.monotonic() - begun > max_wait_seconds:
                    exchange.fail_overdue(rank, max_wait_seconds)
            if exchange.stop_reason is None and idle_timer.is_idle_for(max_wait_seconds):
                exchange.fail(
                    f"no rank has done anything for {max_wait_seconds / 60:.0f} minutes",
                    "see what they wait for: what other processes of the program would send does not come",
                )
            next(deadlines)
        except KeyboardInterrupt:
            exchange.stop(EndReason.INTERRUPTED.value)
            for process in living.values():
                process.signal(signal.SIGINT)
    return {process.rank: process.result for process in processes if process.result is not None}, exchange.problem


def _has_live_process(groups: Set[int]) -> bool:
    """Return whether any process of these groups runs; False where that cannot be known."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, group = entry.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(group) in groups:
                return True
    return False


class _IdleTimer:
    """Timer of the time without messages and computation: ranks may wait for events not seen here, such as a queue."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes
        self._seconds = 0.0
        self._since = time.monotonic()

    def restart(self) -> None:
        """Restart the timer: a rank has sent a message."""
        self._since = time.monotonic()

    def is_idle_for(self, seconds: float) -> bool:
        """Return whether the ranks have been idle for `seconds`."""
        if time.monotonic() - self._since < seconds:
            return False
        used = sum(_get_cpu_seconds(process.pid) for process in self._processes)
        if used > self._seconds + _IDLE_CPU_SECONDS:
            self._seconds = used
            self.restart()
            return False
        return True


def _get_cpu_seconds(pid: int) -> float:
    """Return the processor seconds that a process has used; 0 where they are not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def _signal_overdue(exchange: Exchange, living: dict[Connection, _Process]) -> Iterator[None]:
    """Signal the ranks that do not react to a stop, first SIGTERM, then SIGKILL; a generator, advanced periodically."""
    while exchange.stop_reason is None:
        yield
    is_wrong = exchange.problem or exchange.stop_reason == PEER
    for number, seconds in ((signal.SIGTERM, _ERROR_SECONDS), (signal.SIGKILL, _EXIT_SECONDS)):
        end = time.monotonic() + (seconds if is_wrong else MAX_WAIT_SECONDS)
        while time.monotonic() < end:
            yield
        for process in living.values():
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
    ending_text = f"was killed by {name}" if name else f"ended without a word, with exit code {code}"
    if exchange.stop_reason is None:
        hint = "the kernel kills what takes the memory of others: run fewer ranks (--ranks 0,1), or one alone (--rank)"
        exchange.fail(
            f"rank {process.rank} {ending_text}",
            hint if name == "SIGKILL" else "run it alone: --rank " + str(process.rank),
        )
    exchange.record_end(process.rank, ending_text)
