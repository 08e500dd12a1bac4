"""Progress of the present work: whoever does it says how to ask, and whoever shows it asks from a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_ASKED: list[Callable[[], str]] = []


@contextlib.contextmanager
def report_progress_with(ask: Callable[[], str]) -> Iterator[None]:
    """Have `progress_text` return what `ask` says, while open; it is called from another thread, and may fail."""
    _ASKED.append(ask)
    try:
        yield
    finally:
        _ASKED.remove(ask)


def progress_text() -> str:
    """Return how far the work is, such as "layer 12 of 36"; empty: not known."""
    try:
        return _ASKED[-1]() if _ASKED else ""
    except Exception:  # what is looked at changes in the meantime
        return ""
