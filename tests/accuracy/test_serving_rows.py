"""The closed form of inference engines beside start-up logs that others published: shared/serving.csv."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accuracy.serving_rows import Comparison, compare_rows, summarize


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    shared = Path(__file__).resolve().parents[3] / "shared"
    if not (shared / "serving.csv").is_file():
        pytest.skip("no shared data")
    return list(compare_rows(shared))


# Kind of figure -> bounds of the median and of the 90th percentile.
BOUNDS = {"weights": (0.005, 0.005), "profile peak": (0.02, 0.08), "KV cache": (0.04, 0.12), "tokens": (0.04, 0.12)}


@pytest.mark.parametrize("kind", BOUNDS)
def test_figures_are_within_the_bounds(rows: list[Comparison], kind: str) -> None:
    count, median, high = summarize(rows, kind)
    assert count >= 4
    assert (median, high) <= BOUNDS[kind] and high <= BOUNDS[kind][1]


def test_tokens_follow_from_the_cache(rows: list[Comparison]) -> None:
    count, median, high = summarize(rows, "layout", exclusive=False)
    assert count >= 15
    assert median <= 0.005 and high <= 0.02


def test_starts_are_told_from_refusals(rows: list[Comparison]) -> None:
    judged = [row for row in rows if row.starts is not None and row.is_exclusive]
    assert len(judged) >= 25
    assert sum(row.starts is row.started for row in judged) >= 0.95 * len(judged)


def test_the_band_holds_nine_of_ten(rows: list[Comparison]) -> None:
    inside = [row.is_in_band for row in rows if row.is_in_band is not None and row.is_exclusive]
    assert sum(inside) >= 0.9 * len(inside)
