"""Runs without garbage collection, so that one is like another."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect no cyclic garbage: its frees would depend on what else the process does, not on references alone."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def freeze_libraries() -> None:
    """Let garbage go, and leave what remains out of every later search for it.

    Does so where the collector is off, as in memprof's own commands: torch and the libraries are millions of objects
    that live for good, and each search would look through them.
    """
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
