"""Slots of LoRA adapters."""

from __future__ import annotations

import pytest

from memprof.errors import UsageError
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.lora import count_lora_bytes


def test_slots_by_hand() -> None:
    # Inputs and outputs of q, k, v, o, gate, up and down, and of the embedding and the output head.
    layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    rows = 32 * layer + 2 * (128256 + 4096)
    assert count_lora_bytes(load_served_model("llama-3.1-8b"), 4, 16, 1) == 4 * 16 * rows * 2


def test_only_what_is_divided_is_smaller_on_two_ranks() -> None:
    layer = 2 * (2048 + 4096) + 2 * (4096 + 512) + 3 * (4096 + 7168)
    rows = 32 * layer + 2 * (128256 + 4096)
    assert count_lora_bytes(load_served_model("llama-3.1-8b"), 1, 8, 2) == 8 * rows * 2


@pytest.mark.parametrize(
    ("model", "rank", "problem"), [("qwen3-30b-a3b", 16, "plain decoders"), ("llama-3.1-8b", 24, "no such --max-lora")]
)
def test_what_is_not_known_is_an_error(model: str, rank: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        count_lora_bytes(load_served_model(model), 1, rank, 1)
