"""Exit codes: each means one thing, whatever the command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit code says."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    DOES_NOT_FIT = 3
    DIFFERS = 4
    INTERRUPTED = 130


MEANINGS = {
    Exit.DONE: "done: it fits, agrees, passes, as far as that was asked",
    Exit.FAILED: "no answer: something failed, cannot be simulated, or showed too little",
    Exit.WRONG_USE: "wrong use: an unknown name, a value out of range, a file that is not what it should be",
    Exit.DOES_NOT_FIT: "it does not fit, or in a recording did not",
    Exit.DIFFERS: "it differs by more than is allowed (compare, verify)",
    Exit.INTERRUPTED: "interrupted (Ctrl-C)",
}
OF_OTHERS = (
    "A script under `memprof run` that fails or leaves with an exit code has its own passed on (1 for 2, 3 and 4), and "
    "so has the command of `memprof monitor` (128 + n if signal n killed it, 127 or 126 if it could not be started)."
)
