"""What the comparison with PEFT's published runs rests on: steps of lengths in between are as they are simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.peft_lengths import Method
from tests.unit.workload.test_modes import TINY

_SETTINGS = {"optimizer_type": "AdamW", "optimizer_kwargs": {"lr": 1e-4}, "grad_norm_clip": 1.0}
PUBLISHED = {"run_info": {"experiment_name": "tiny", "train_config": _SETTINGS, "peft_config": None}}


@pytest.mark.nightly
@pytest.mark.slow
def test_steps_in_between_are_as_simulated(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "vocab_size": 4000, "max_position_embeddings": 512}))
    made = Method(
        PUBLISHED,
        str(config),
        (64, 64, *range(70, 100, 5), 96, 101, 112, 117, *range(128, 192, 8), 131, 141, 155, 171, 183),
    )
    simulated = Method(PUBLISHED, str(config), (64, 64, 83, 96, 136, 77))
    for step, _ in list(simulated.steps())[2:]:
        again = made.step(step.length)
        assert again.requests == step.requests
        assert again.sizes == pytest.approx(step.sizes, abs=512)  # scratch of sorts and sums
    assert made.reserved([83, 96, 136, 77]) == simulated.reserved([83, 96, 136, 77])
