"""Operators of torchvision that have no meta kernel: which boxes they keep is a choice by values."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernels.registry import kernel, kernel_of
from memprof.virtual.launch import Launch

_aten = torch.ops.aten
_BOXES_PER_BLOCK = 64


def nms(launch: Launch) -> Any:
    """Non-maximum suppression (torchvision/csrc/ops/cuda/nms_kernel.cu): unknown boxes do not overlap, all are kept.

    CUDA sorts the scores, and keeps for each box one bit for every other.
    """
    boxes, scores = launch.args[:2]
    if not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    launch.values.assume("Non-maximum suppression keeps every box: where they lie is not known.")
    with launch.inside():
        order = _aten.sort.stable(scores, stable=True, dim=0, descending=True)[1]
        ranked = _aten.index_select.default(boxes, 0, order)
        count = boxes.shape[0]
        bits = _aten.new_empty.default(order, [count * -(-count // _BOXES_PER_BLOCK)])
        kept = _aten.new_empty.default(order, [count], dtype=torch.bool)
        kept.logical_or_(ranked.select(1, 0) >= 0)
        result = _aten.masked_select.default(order, kept)
    del bits
    return result


def register_loaded() -> None:
    """Register the operators, once torchvision has been imported."""
    found = getattr(torch.ops.torchvision, "nms", None)
    if found is not None and kernel_of(found) is None:
        kernel(found, on_host=True)(nms)
