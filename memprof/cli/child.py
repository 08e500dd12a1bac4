"""A command that runs a program of others does so in a child process, and its parent says how that ended.

Such a program may end its process where memprof is not asked: by os._exit in a thread, a signal, a crash in a library,
another program in its place (exec). Without the parent the exit code would be the program's, 0 perhaps, with nothing
printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import typer

from memprof.cli.streams import tell
from memprof.errors import MemprofError

_PASSED_ON = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
}
# siginfo's si_code is this or below if a process sent the signal, and above if the kernel did (a terminal's keys).
_FROM_A_PROCESS = 0
_PR_SET_PDEATHSIG = 1
_WHY: dict[int, str] = {
    signal.SIGKILL: "the kernel kills processes when host memory runs out (dmesg says so): free some, or take less",
    signal.SIGSEGV: "a library crashed: virtual tensors have no data; python -X faulthandler shows where",
}
_OTHERWISE = "leave out what ends the process (os._exit in a thread, a signal to itself, a daemon) under memprof"


class _Parent:
    """The state of this process as a parent: whether it may have a child, and where the child tells its exit code."""

    is_allowed = False
    process = 0
    told: Any = None  # memory shared with the parent, which programs do not close: the exit code + 1, 0 before that


_parent = _Parent()


def allow_child() -> None:
    """Note that this process is the command's own, and ends with its exit code: not that of a test or a notebook."""
    _parent.is_allowed = True


def continue_in_child(*, as_json: bool) -> None:
    """Fork: return in the child, which runs the command; in the parent wait for it and raise `typer.Exit` as it does.

    Nothing is done where this process is not the command's own, or has no `fork` or `sigtimedwait` (macOS, Windows).
    With `as_json` the parent's error, if the child ends without a word, is printed as JSON too.
    """
    if not (_parent.is_allowed and hasattr(os, "fork") and hasattr(signal, "sigtimedwait")):
        return
    import ctypes  # here and not above: most commands have no child
    import mmap

    sys.stdout.flush()
    sys.stderr.flush()
    told, parent = mmap.mmap(-1, 2), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})  # none is lost in between
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError, AttributeError):  # Linux
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _parent.process, _parent.told = os.getpid(), told
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    status, received = _wait(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = int.from_bytes(told[:2], "little") - 1
    raise typer.Exit(_tell_end(status, received, as_json=as_json) if code < 0 else code)


def tell_exit_code(code: int) -> None:
    """Tell the parent, if there is one, that the command has said what it has to say, and ends with `code`."""
    if _parent.told is not None and os.getpid() == _parent.process:  # not a child that the program has forked
        _parent.told[:2] = ((code & 0xFF) + 1).to_bytes(2, "little")


def _wait(child: int) -> tuple[int, set[int]]:
    """Wait until the child has ended; return its exit code, -n if signal n killed it, and the signals sent here."""
    received: set[int] = set()
    while True:
        # Asked before each wait: signals of several children may become one.
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status), received
        information = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, 1.0)
        if information is not None and information.si_signo != signal.SIGCHLD:
            received.add(information.si_signo)
            if information.si_code <= _FROM_A_PROCESS:  # what the terminal sends, the child has got itself
                os.kill(child, information.si_signo)


def _tell_end(status: int, received: set[int], *, as_json: bool) -> int:
    """Say how a child ended that told nothing; return the exit code."""
    if -status in received:  # somebody has ended the run
        return 128 - status
    try:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    except ValueError:
        how = f"was killed by signal {-status}"
    error = MemprofError(
        "no verdict: the script ended its process before memprof could report",
        value=f"it {how}",
        hint=_WHY.get(-status, _OTHERWISE) if status < 0 else _OTHERWISE,
    )
    tell(error, as_json=as_json)
    return error.exit_code
