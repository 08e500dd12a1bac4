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
