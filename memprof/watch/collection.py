"""Python's garbage collector: what refers to what, and control of it, for frees must not depend on its timing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator
from typing import Any

_MAX_ARGUMENTS = 32  # of gc.get_referrers, which compares each reference of every object with each of them


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


def find_referrers(values: Collection[Any]) -> list[Any]:
    """Return the objects that refer to one of `values`, of those that the collector tracks and that are not frozen."""
    if len(values) <= _MAX_ARGUMENTS:
        return gc.get_referrers(*values)
    ids = set(map(id, values))
    return [one for one in gc.get_objects() if not ids.isdisjoint(map(id, gc.get_referents(one)))]
