"""What a lane changes beside which tests it has (conftest.py)."""

from __future__ import annotations

import os

LANE = "MEMPROF_LANE"
"""The lane, for what is asked while test modules are imported."""


def examples(number: int) -> int:
    """Of a property's `number` examples what this lane draws: at night all, else a third."""
    return number if os.environ.get(LANE) == "nightly" else -(-number // 3)
