"""What hides GPUs from CUDA."""

import os

import pytest

from memprof.device import visible
from memprof.device.cards import NvmlCard, Reading


@pytest.mark.parametrize(("cards", "left"), [((), None), ((NvmlCard(0, "NVIDIA H100 80GB HBM3"),), "")])
def test_gpus_are_hidden_where_there_are_any(monkeypatch, cards, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # put back when the test ends
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(visible, "read_cards", lambda: Reading(cards))
    visible.hide_gpus()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left
