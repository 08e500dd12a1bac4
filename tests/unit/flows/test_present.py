"""The card that is here, as options of a virtual one."""

import pytest

from memprof.device.cards import NvmlCard, Reading, Slice
from memprof.flows import present


@pytest.mark.parametrize(("visible", "size"), [("", 5), ("MIG-two", 20)])
def test_a_slice_is_not_taken_for_its_card(monkeypatch, visible, size):
    slices = tuple(
        Slice(index, "MIG", f"MIG-{name}", index, total << 30, 0, total << 30)
        for index, (name, total) in enumerate((("one", 5), ("two", 20)))
    )
    card = NvmlCard(0, "NVIDIA A100-SXM4-40GB", total_bytes=40 << 30, slices=slices)
    monkeypatch.setattr(present, "read_cards", lambda: Reading((card,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert present.present_card() == {"gpu_vram_bytes": size << 30}


def test_a_slice_that_cannot_be_read_is_no_card(monkeypatch):
    card = NvmlCard(
        0, "NVIDIA H100 80GB HBM3", total_bytes=80 << 30, slices=(Slice(0, "MIG", "", 0, None, None, None),)
    )
    monkeypatch.setattr(present, "read_cards", lambda: Reading((card,)))
    assert present.present_card() == {}
