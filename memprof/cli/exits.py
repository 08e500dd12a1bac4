"""Exit codes, with the same meaning in all commands."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The meaning of a command's exit code."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    DOES_NOT_FIT = 3
    DIFFERS = 4
    INTERRUPTED = 130


MEANINGS = {
    Exit.DONE: "completed: it fits, agrees or passes",
    Exit.FAILED: "could not complete: something failed, cannot be simulated, or too little was seen",
    Exit.WRONG_USE: "usage error: an unknown name, a value out of range, a file of the wrong kind",
    Exit.DOES_NOT_FIT: "it does not fit, or in a recording did not",
    Exit.DIFFERS: "outside the tolerance (compare, verify)",
    Exit.INTERRUPTED: "interrupted (Ctrl-C)",
}
OF_OTHERS = (
    "A script under `memprof run` that fails or leaves with an exit code has its own passed on (1 for 2, 3 and 4), and "
    "so has the command of `memprof monitor` (128 + n if signal n killed it, 127 or 126 if it could not be started)."
)
