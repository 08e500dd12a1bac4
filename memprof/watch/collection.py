"""Runs without garbage collection, so that one is like another."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_left_out_before = False
"""Whether anything was left out before, so that runs may have left garbage since."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Cyclic garbage would be freed at a moment that depends on what else the process does; a run's frees come from
    reference counts alone."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def look_through_no_more() -> None:
    """Where the collector is off, as in memprof's own commands: what is there now is left out of every later search
    for garbage. Torch and the libraries are half a million objects that live for good."""
    global _left_out_before
    if not gc.isenabled():
        if _left_out_before:  # imports alone leave no garbage that is worth the search
            gc.collect()
        gc.freeze()
        _left_out_before = True
