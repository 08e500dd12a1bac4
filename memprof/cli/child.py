"""The child process of commands that run a user's program; the parent reports how the child ended.

A program may end its process without memprof's code running: by os._exit in a thread, a signal, a crash in a library,
or exec. Without a parent, memprof would print nothing, and the exit code would be the program's, perhaps 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import typer

from memprof.cli.streams import report_error
from memprof.errors import MemprofError

_FORWARDED_SIGNALS = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
}
# siginfo's si_code is at most this if a process sent the signal, and above if the kernel did (keys in a terminal).
_MAX_PROCESS_SI_CODE = 0
_PR_SET_PDEATHSIG = 1
_KILL = getattr(signal, "SIGKILL", 9)  # Windows has none
_SIGNAL_HINTS: dict[int, str] = {
    _KILL: "the kernel kills processes when host memory runs out (dmesg says so): free some, or take less",
    signal.SIGSEGV: "a library crashed: virtual tensors have no data; python -X faulthandler shows where",
}
_DEFAULT_HINT = "leave out what ends the process (os._exit in a thread, a signal to itself, a daemon) under memprof"


class _ForkState:
    """The state of forking: whether this process may fork, the child's pid, and shared memory for its exit code."""

    can_fork = False
    child_pid = 0
    shared_code: Any = None  # memory shared with the parent: exit code + 1, or 0 while unknown


_fork_state = _ForkState()


def allow_fork() -> None:
    """Allow `continue_in_child` to fork; not called in tests and notebooks, whose process must not fork."""
    _fork_state.can_fork = True


def continue_in_child(*, as_json: bool) -> None:
    """Fork and return in the child, which runs the command; the parent raises `typer.Exit` with the child's exit code.

    Do nothing unless `allow_fork` was called, and on systems without `fork` or `sigtimedwait` (macOS, Windows). If the
    child ends without sending an exit code, print an error, with `as_json` also as JSON.
    """
    if not (_fork_state.can_fork and hasattr(os, "fork") and hasattr(signal, "sigtimedwait")):
        return
    import ctypes  # imported here: most commands have no child
    import mmap

    from memprof.monitor.probe import remove_refusal_files

    sys.stdout.flush()
    sys.stderr.flush()
    shared_code, parent_pid = mmap.mmap(-1, 2), os.getpid()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED_SIGNALS, signal.SIGCHLD})  # kept until the wait
    child_pid = os.fork()
    if child_pid == 0:
        with contextlib.suppress(OSError, AttributeError):  # Linux
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
        _fork_state.child_pid, _fork_state.shared_code = os.getpid(), shared_code
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        return
    status, received_signals = _wait_for_child(child_pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    remove_refusal_files(child_pid)
    exit_code = int.from_bytes(shared_code[:2], "little") - 1
    raise typer.Exit(_report_child_end(status, received_signals, as_json=as_json) if exit_code < 0 else exit_code)


def send_exit_code(code: int) -> None:
    """Send the command's exit code to the parent process, if there is one; call it after all output."""
    is_child = os.getpid() == _fork_state.child_pid  # False in a process that the program has forked
    if _fork_state.shared_code is not None and is_child:
        _fork_state.shared_code[:2] = ((code & 0xFF) + 1).to_bytes(2, "little")


def _wait_for_child(child_pid: int) -> tuple[int, set[int]]:
    """Wait for a child; return its exit code (-n if signal n killed it), and the signals received in the meantime."""
    received_signals: set[int] = set()
    while True:
        # Checked before each wait: SIGCHLD of several children may be merged into one.
        pid, status = os.waitpid(child_pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), received_signals
        signal_info = signal.sigtimedwait({*_FORWARDED_SIGNALS, signal.SIGCHLD}, 1.0)
        if signal_info is not None and signal_info.si_signo != signal.SIGCHLD:
            received_signals.add(signal_info.si_signo)
            if signal_info.si_code <= _MAX_PROCESS_SI_CODE:  # the terminal sends its signals to the child too
                os.kill(child_pid, signal_info.si_signo)


def _report_child_end(status: int, received_signals: set[int], *, as_json: bool) -> int:
    """Print how a child ended (`status`: -n if signal n killed it), and return the exit code of the command."""
    if -status in received_signals:  # the user ended the run
        return 128 - status
    try:
        ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    except ValueError:
        ending = f"was killed by signal {-status}"
    error = MemprofError(
        "no verdict: the script ended its process before memprof could report",
        value=f"it {ending}",
        hint=_SIGNAL_HINTS.get(-status, _DEFAULT_HINT) if status < 0 else _DEFAULT_HINT,
    )
    report_error(error, as_json=as_json)
    return error.exit_code
