"""torchtune's table of techniques, whose layers were compiled: what the GPU took at most, published and computed here.

Source and recipes: tests/accuracy/published/torchtune.py. docs/accuracy-tables.md has all rows, and what eager layers
take.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.accuracy import torchtune_recipe
from tests.accuracy.published.prediction import run
from tests.accuracy.published.torchtune import LADDER

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
pytestmark = pytest.mark.nightly

# Peak of allocated memory in GiB, and what eager layers take.
PUBLISHED = {
    "+ compile": (51.0, 59.95),
    "+ chunked CE": (42.9, 51.88),
    "+ activation checkpointing": (24.9, 25.29),
    "+ optimizer in backward": (23.1, 23.20),
}


@pytest.mark.parametrize("technique", PUBLISHED)
def test_compiled_layers_take_what_was_published(technique: str) -> None:
    recipe, _ = LADDER[technique]
    published, eager = PUBLISHED[technique]
    peaks = [
        run(lambda gpu, asked=asked: torchtune_recipe.train(asked), "a100-80gb").allocated / 2**30
        for asked in (recipe, dataclasses.replace(recipe, compiled=True))
    ]
    assert peaks[0] == pytest.approx(eager, abs=0.005)
    assert peaks[1] == pytest.approx(published, rel=0.005)
