"""Runs without garbage collection, so that one is like another."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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


def look_through_no_more(*, after_runs: bool = False) -> None:
    """Where the collector is off, as in memprof's own commands: what is there now is left out of every later search
    for garbage. Torch and the libraries are half a million objects that live for good.

    `after_runs`: but for garbage, which is let go of first. Imports leave none that is worth the search.
    """
    if not gc.isenabled():
        if after_runs:
            gc.collect()
        gc.freeze()
