"""The watched command, started as a shell would start the command.

The command has memprof's standard input, output and error and process group, so that keys pressed on the terminal reach
the command (Ctrl-C, Ctrl-\\, Ctrl-Z). Signals sent to memprof alone are forwarded. The command's exit code becomes
memprof's.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

from memprof.device.processes import read_own_peak_bytes
from memprof.errors import MemprofError

# siginfo's si_code: at most 0 if a process sent the signal, above 0 if the kernel did (a terminal's keys).
_MAX_PROCESS_SI_CODE = 0
_FORWARDED_SIGNALS = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class CommandError(MemprofError):
    """Error: the command cannot be started; the exit codes are those of a shell."""

    exit_code = 127


class NotExecutableError(CommandError):
    """Error: the command exists and is not executable."""

    exit_code = 126


class Signals:
    """Context manager: block the signals that end a program, and receive them one by one.

    A signal that memprof was started to ignore (nohup, a job in the background) stays ignored, in memprof and the
    command.
    """

    def __init__(self) -> None:
        names = [*_FORWARDED_SIGNALS, "SIGTSTP", "SIGCHLD"]
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        self._signals = {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
        self._signals.add(signal.SIGCHLD)
        self._previous_handlers: dict[int, object] = {}
        self._previous_mask: set[int | signal.Signals] | None = None  # signals that were blocked before `block`

    def __enter__(self) -> Signals:
        # A started program inherits blocked signals but not handlers: signals are blocked only once the command runs.
        for number in self._signals - {signal.SIGCHLD}:
            self._previous_handlers[number] = signal.signal(number, lambda *_: None)
        return self

    def block(self) -> None:
        """Block the signals from now on; `wait` receives them."""
        self._previous_mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._signals))

    def wait(self, seconds: float) -> signal.struct_siginfo | None:
        """Return the next signal, or None after `seconds`."""
        return signal.sigtimedwait(self._signals, max(seconds, 0.0))

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._previous_mask is not None:
            while kind is None and signal.sigtimedwait(self._signals, 0) is not None:
                pass  # signals after the command's end
            signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        for number, before in self._previous_handlers.items():
            signal.signal(number, before)  # type: ignore[arg-type]


class RunningCommand:
    """A running command; `environment` has variables in addition to memprof's own. Raises CommandError if there is no
    such program, or the program cannot be run."""

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
        """Return the command's exit code: None while the command runs; 128 + n if signal n has killed the command."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def describe_end(self) -> str:
        """Return how the command ended, in a few words."""
        code = self._process.poll()
        if code is None or code >= 0:
            return "still runs" if code is None else f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        note = "; if nobody did, the kernel may have run out of memory (see dmesg)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{note}"

    def read_peak_resident_bytes(self) -> int:
        """Return the peak resident bytes of the command's largest process, after its end; 0 where the peak is not
        known."""
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        # Until exec, a started process counts memprof's pages as its own. memprof's own ru_maxrss is not used: it
        # includes the parent's pages in the same way.
        own_peak = read_own_peak_bytes()
        return peak if own_peak is not None and peak > own_peak else 0

    def forward_signal(self, signal_info: signal.struct_siginfo) -> None:
        """Forward a signal that a process sent to memprof; the command itself receives the terminal's signals."""
        number = signal_info.si_signo
        if signal_info.si_code <= _MAX_PROCESS_SI_CODE and number not in (signal.SIGCHLD, signal.SIGTSTP):
            self._process.send_signal(number)
