"""The watched command: started as a shell would start it, and left alone.

It has our standard input, output and error, and our process group, so that keys pressed on the terminal reach it
(Ctrl-C, Ctrl-\\, Ctrl-Z). What is sent to memprof alone is sent on. Its exit code becomes ours.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from memprof.device.processes import own_peak_bytes
from memprof.errors import MemprofError

# siginfo's si_code is this or below if a process sent the signal, and above if the kernel did (a terminal's keys).
_FROM_A_PROCESS = 0
_SENT_ON = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class CommandError(MemprofError):
    """The command cannot be started; the exit codes are those of a shell."""

    exit_code = 127


class NotExecutableError(CommandError):
    """It is there and is no program."""

    exit_code = 126


class Signals:
    """Signals that end a program, held back and taken one by one: a context manager.

    A signal that memprof was started to ignore (nohup, a job in the background) stays ignored, here and in the command.
    """

    def __init__(self) -> None:
        names = [*_SENT_ON, "SIGTSTP", "SIGCHLD"]
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        self._taken = {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
        self._taken.add(signal.SIGCHLD)
        self._before: dict[int, object] = {}
        self._mask: set[int | signal.Signals] | None = None  # what was blocked before `hold`

    def __enter__(self) -> Signals:
        # A handler is reset in a started program, a blocked signal is not: it is blocked only once the command runs.
        for number in self._taken - {signal.SIGCHLD}:
            self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def hold(self) -> None:
        """Hold signals from now on, until `wait` takes them."""
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._taken))

    def wait(self, seconds: float) -> signal.struct_siginfo | None:
        """The next signal, or None after `seconds`."""
        return signal.sigtimedwait(self._taken, max(seconds, 0.0))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._mask is not None:
            while kind is None and signal.sigtimedwait(self._taken, 0) is not None:
                pass  # those that came too late for the command
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]


class RunningCommand:
    """A command that runs; `environment` has variables beside our own.
    Raises CommandError: there is no such program, or it cannot be run."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.text = shlex.join(arguments)
        try:
            self._process = subprocess.Popen(list(arguments), env={**os.environ, **environment})
        except FileNotFoundError:
            raise CommandError("there is no such command", value=arguments[0]) from None
        except OSError as error:
            raise NotExecutableError(
                "the command cannot be run", value=arguments[0], hint=(error.strerror or str(error)).lower()
            ) from None
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return its exit code: None while it runs; 128 + n if signal n has killed it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def ending(self) -> str:
        """Return how it ended, in a few words."""
        code = self._process.poll()
        if code is None or code >= 0:
            return "still runs" if code is None else f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = "; if nobody did, the kernel may have run out of memory (see dmesg)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{why}"

    def peak_resident_bytes(self) -> int:
        """The most that the largest of its processes had, once it has ended; 0 where that is not known."""
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        # Until it becomes another program, a started process counts our pages as its own. Not our own ru_maxrss: that
        # has the pages of whoever started us in the same way.
        ours = own_peak_bytes()
        return peak if ours is not None and peak > ours else 0

    def pass_on(self, information: signal.struct_siginfo) -> None:
        """Send a signal on that a process sent to us; what the terminal sends, the command has got itself."""
        number = information.si_signo
        if information.si_code <= _FROM_A_PROCESS and number not in (signal.SIGCHLD, signal.SIGTSTP):
            self._process.send_signal(number)


now = time.monotonic
