"""Measuring on where one measurement fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attempt(measure: Callable[[], Any]) -> Any:
    """Return what `measure` returns, or {"error": what it raised}."""
    try:
        return measure()
    except Exception as error:  # whatever it is, it is the finding
        return {"error": f"{type(error).__name__}: {error}"[:600]}
