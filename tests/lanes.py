"""What a lane changes beside which tests it has (conftest.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

LANE = "MEMPROF_LANE"  # The lane, for what is asked while test modules are imported.


def at_night() -> bool:
    """Whether the lane is that of the night, for a test that does less by day."""
    return os.environ.get(LANE) == "nightly"


def examples(number: int) -> int:
    """Of a property's `number` examples what this lane draws: at night all, else a third."""
    return number if at_night() else -(-number // 3)


def by_day(cases: Iterable[Any], *shown: Any) -> list[Any]:
    """The cases of a test, of which `make test` has those `shown`, and `make nightly` the others."""
    cases = list(cases)
    for one in shown:
        if one not in cases:
            raise ValueError(f"there is no case {one!r}")
    night = pytest.mark.nightly
    return of_lane(
        case if case in shown else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=night)
        for case in cases
    )


def of_lane(cases: Iterable[Any]) -> list[Any]:
    """Those of `cases` that the lane runs: by day one marked nightly is not even collected, if others are left."""
    cases = list(cases)
    by_night = [any(mark.name == "nightly" for mark in getattr(case, "marks", ())) for case in cases]
    return (
        cases
        if at_night() or all(by_night)
        else [case for case, night in zip(cases, by_night, strict=True) if not night]
    )
