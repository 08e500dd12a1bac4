"""Ctrl-C while modules are imported, which ends the process at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

_IMPORT_MACHINERY = "<frozen importlib._bootstrap>"


def end_interrupted_imports() -> None:
    """Let Ctrl-C end the process during an import; elsewhere it raises KeyboardInterrupt, as usual.

    Libraries do not survive an exception while they are imported: NumPy and transformers turn a KeyboardInterrupt into
    an error of their own, and the initialization of torch aborts. A file is replaced only once it is complete, so that
    none is left half written; a temporary one may stay.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not with nohup
        signal.signal(signal.SIGINT, _handle_interrupt)


def restore_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt everywhere, as in plain Python: a script may do all its work in an import."""
    if signal.getsignal(signal.SIGINT) is _handle_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _handle_interrupt(number: int, frame: FrameType | None) -> None:
    innermost = frame
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_MACHINERY:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        frame = frame.f_back
    signal.default_int_handler(number, innermost)
