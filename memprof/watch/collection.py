"""Garbage collection in runs: off, so that frees do not depend on the collector's timing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Context manager: switch off the cyclic collector, whose frees depend on other work of the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_existing_objects() -> None:
    """Collect garbage, then exclude all remaining objects from later collections (`gc.freeze`).

    Acts only where the collector is off, as in memprof's own commands: torch and the libraries are millions of
    long-lived objects, and each collection would traverse all of them.
    """
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
