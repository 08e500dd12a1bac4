"""Published peaks of generation: what decoding holds is within 1%, and the rest is explained in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.units import MIB
from tests.accuracy import inference_rows
from tests.accuracy.inference_rows import NEW_TOKENS, SHARED, Row

TABLE = SHARED / "published_memory.csv"
pytestmark = pytest.mark.skipif(not TABLE.is_file(), reason=f"no shared data: {TABLE} is not there")

DOCS = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
KV_BYTES_PER_TOKEN = {
    "qwen3-0.6b": 28 * 8 * 128 * 2 * 2,
    "qwen3-4b": 36 * 8 * 128 * 2 * 2,
    "qwen3-8b": 36 * 8 * 128 * 2 * 2,
}
"""Layers x key-value heads x head size x keys and values x bytes, from the models' configurations."""
CHECKED = [("qwen3-0.6b", 1), ("qwen3-0.6b", 6144), ("qwen3-0.6b", 30_720), ("qwen3-4b", 30_720)]
"""Simulated at every run of the tests; the others by `python -m tests.accuracy.inference_rows`."""


def rows() -> dict[tuple[str, int], Row]:
    return {(row.model, row.prompt): row for row in inference_rows.published()} if SHARED.is_dir() else {}


def test_published_figures_differ_by_the_kv_cache_alone() -> None:
    """Which is why they cannot hold a prefill: see the module. One row, 4B with one token, is 23 MiB below its own."""
    by_model: dict[str, list[float]] = {}
    for row in rows().values():
        cache = KV_BYTES_PER_TOKEN[row.model] * (row.prompt + NEW_TOKENS) / MIB
        by_model.setdefault(row.model, []).append(row.mib - cache)
    assert {len(rest) for rest in by_model.values()} == {4}
    spreads = {model: max(rest) - min(rest) for model, rest in by_model.items()}
    assert spreads["qwen3-0.6b"] < 2
    assert spreads["qwen3-8b"] < 2
    assert 22 < spreads["qwen3-4b"] < 25


@pytest.mark.parametrize("key", CHECKED, ids=[f"{model}-{prompt}" for model, prompt in CHECKED])
def test_decoding_holds_what_was_published(key: tuple[str, int]) -> None:
    row = rows()[key]
    simulated = inference_rows.simulate(row)
    assert abs(simulated.decode / MIB / row.mib - 1) < (0.014 if key == ("qwen3-0.6b", 30_720) else 0.01)
    # What is above it is the copy that concatenation makes; without it nothing is left but rounding and scratch.
    assert abs((simulated.decode - simulated.key_copy) / MIB - row.mib) < 8
    assert inference_rows.line(row, simulated) in DOCS.read_text(encoding="utf-8")
