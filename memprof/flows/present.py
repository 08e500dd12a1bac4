"""The card that is here, as options for a virtual one. Alone: cards.py takes as long to import as a kept answer."""

from __future__ import annotations

import os
from typing import Any

from memprof.catalog import find_gpu
from memprof.device.nvml import read_cards
from memprof.errors import UsageError


def card_like(name: str, total_bytes: int) -> dict[str, Any]:
    """The options for a virtual card with this name, if the catalog has it, else with this capacity."""
    try:
        known = find_gpu(name)
    except UsageError:
        return {"gpu_vram_bytes": total_bytes}
    # A slice of a card (MIG) may have its name.
    same = abs(known.total_bytes - total_bytes) * 50 < total_bytes
    return {"gpu": known.key} if same else {"gpu_vram_bytes": total_bytes}


def present_card() -> dict[str, Any]:
    """The options for a virtual card like the first that NVML sees; none where it sees none.

    Of a sliced card (MIG) a process has one slice: that which CUDA_VISIBLE_DEVICES names, or the first.
    """
    card = next(iter(read_cards().cards), None)
    if card is not None and card.slices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        slices = [piece for piece in card.slices if piece.total_bytes is not None]
        slices.sort(key=lambda piece: not piece.uuid or piece.uuid not in visible)
        return {"gpu_vram_bytes": slices[0].total_bytes} if slices else {}
    return {} if card is None or card.usable_bytes is None else card_like(card.name, card.usable_bytes)
