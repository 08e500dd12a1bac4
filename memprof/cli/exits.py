"""Exit codes: each means one thing, whatever the command; and how a process ends with one."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
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

_let_go = [True]


def nothing_is_to_be_let_go() -> None:
    """What this process still holds is memprof's own and the libraries': nobody waits for an object of it to end."""
    _let_go[0] = False


def end_at_once(code: int) -> None:
    """Python ends the process with `code`; where nothing is to be let go, as soon as its last functions have run.

    Python would first let go of the objects of torch and the libraries, one by one: a tenth of a second.
    """
    if not _let_go[0] and not sys.flags.inspect:
        atexit.register(_end, code, atexit._ncallbacks() + 1)


def _end(code: int, known: int) -> None:
    """The first of the `known` last functions: those that were registered before it follow inside."""
    if _let_go[0] or atexit._ncallbacks() > known:
        return
    _let_go[0] = True
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):  # what cannot be written is told by Python
        sys.stdout.flush()
        sys.stderr.flush()
        _flush_libraries()
        os._exit(code)


def _flush_libraries() -> None:
    """What libraries have written with C's stdio, as MKL does with MKL_VERBOSE, and is still in a buffer."""
    if "ctypes" in sys.modules and os.name == "posix":
        sys.modules["ctypes"].CDLL(None).fflush(None)
