"""Control of Python's garbage collector: frees must not depend on its timing where memprof can choose it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Context manager: disable Python's cyclic garbage collector, and enable it again if it was enabled before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_existing_objects() -> None:
    """Collect garbage, then exclude all remaining objects from later collections (`gc.freeze`).

    Does nothing if the collector is enabled. memprof's own commands disable it. Without the freeze, each explicit
    collection would traverse the millions of long-lived objects of torch and other libraries.
    """
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
