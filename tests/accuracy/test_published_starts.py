"""Start-up logs that were found after the closed form was made, beside it, but for rows with a likely cause."""

from __future__ import annotations

import pytest

from tests.accuracy.published_starts import compare_starts
from tests.accuracy.serving_rows import Comparison, summarize


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    return list(compare_starts())


@pytest.mark.parametrize(
    ("kind", "count", "median", "high"),
    [
        ("weights", 15, 0.002, 0.015),
        ("layout", 12, 0.001, 0.002),
        ("KV cache", 8, 0.02, 0.07),
        ("tokens", 6, 0.03, 0.07),
    ],
)
def test_figures(rows: list[Comparison], kind: str, count: int, median: float, high: float) -> None:
    found, half, most = summarize(rows, kind)
    assert found >= count
    assert (half <= median, most <= high) == (True, True), (half, most)


def test_starts_are_told_from_refusals(rows: list[Comparison]) -> None:
    assert all(row.starts is row.started for row in rows if row.starts is not None)
