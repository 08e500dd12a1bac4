"""Exit codes, which have the same meaning in all commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code of a command."""

    DONE = 0
    FAILED = 1
    USAGE_ERROR = 2
    DOES_NOT_FIT = 3
    DIFFERS = 4
    INTERRUPTED = 130


CODE_MEANINGS = {
    ExitCode.DONE: "completed: it fits, agrees or passes",
    ExitCode.FAILED: "could not complete: something failed, cannot be simulated, or too little was seen",
    ExitCode.USAGE_ERROR: "usage error: an unknown name, a value out of range, a file of the wrong kind",
    ExitCode.DOES_NOT_FIT: "it does not fit, or in a recording did not",
    ExitCode.DIFFERS: "outside the tolerance (compare, verify)",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}
EXIT_CODE_NOTE = (
    "A script under `memprof run` that fails or leaves with an exit code has its own passed on (1 for 2, 3 and 4), and "
    "so has the command of `memprof monitor` (128 + n if signal n killed it, 127 or 126 if it could not be started)."
)
