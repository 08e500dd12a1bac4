"""Progress of the current run: the run registers a function, and the display calls it from another thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_DESCRIBERS: list[Callable[[], str]] = []


@contextlib.contextmanager
def report_progress_with(describe: Callable[[], str]) -> Iterator[None]:
    """Context manager: make `describe_progress` return the result of `describe`, which any thread may call."""
    _DESCRIBERS.append(describe)
    try:
        yield
    finally:
        _DESCRIBERS.remove(describe)


def describe_progress() -> str:
    """Return the progress of the current run, such as "layer 12 of 36"; empty if unknown."""
    try:
        return _DESCRIBERS[-1]() if _DESCRIBERS else ""
    except Exception:  # the run changes the trace while it is read
        return ""
