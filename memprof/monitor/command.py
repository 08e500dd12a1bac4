"""The watched command, started as by a shell.

The command has memprof's standard input, output and error and process group, so that keys pressed on the terminal reach
the command (Ctrl-C, Ctrl-\\, Ctrl-Z). Signals sent to memprof alone are forwarded. memprof exits with the command's
exit code.
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
    """Error if the command cannot be started; exit codes are as in a shell."""

    exit_code = 127


class NotExecutableError(CommandError):
    """Error if the command exists and is not executable."""

    exit_code = 126


class Signals:
    """Context manager: block the signals that end a program, and receive them one by one.

    A signal that memprof was started to ignore (nohup, a job in the background) stays ignored, in memprof and the
    command.
    """

    def __init__(self) -> None:
        names = [*_FORWARDED_SIGNALS, "SIGTSTP", "SIGCHLD"]
        signal_numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        self._signals = {number for number in signal_numbers if signal.getsignal(number) != signal.SIG_IGN}
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

    def __exit__(self, error_type: type[BaseException] | None, *exc: object) -> None:
        if self._previous_mask is not None:
            while error_type is None and signal.sigtimedwait(self._signals, 0) is not None:
                pass  # signals after the command's end
            signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)
        for number, previous_handler in self._previous_handlers.items():
            signal.signal(number, previous_handler)  # type: ignore[arg-type]


class RunningCommand:
    """A running command; `environment` has variables in addition to memprof's own. Raises CommandError if the program
    does not exist or cannot be run."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command_line = shlex.join(arguments)
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
        """Return a description of how the command ended, such as "ended with exit code 1"."""
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
        """Return the peak resident bytes of the command's largest process, once the command has ended; 0 where it is
        unknown."""
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        # Until exec, a started process counts memprof's pages as its own. memprof's own ru_maxrss is not used: it
        # includes the parent's pages in the same way.
        own_peak = read_own_peak_bytes()
        return peak if own_peak is not None and peak > own_peak else 0

    def forward_signal(self, signal_info: signal.struct_siginfo) -> None:
        """Forward a signal to the command if a process sent it: the command receives the terminal's signals itself."""
        number = signal_info.si_signo
        if signal_info.si_code <= _MAX_PROCESS_SI_CODE and number not in (signal.SIGCHLD, signal.SIGTSTP):
            self._process.send_signal(number)
