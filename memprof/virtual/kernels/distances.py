"""Distances between all rows of two matrices (native/Distance.cpp, cdist_impl)."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_aten = torch.ops.aten
_FEW_ROWS = 25


@kernel(_aten._cdist_forward)
def cdist(launch: Launch) -> Any:
    """Of batches made equal and contiguous; Euclidean ones of many rows by a matrix product."""
    *rows, p = launch.args[:3]
    mode = launch.argument(3, "compute_mode") or 0
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in rows))
    expanded = [each.expand(*batch, *each.shape[-2:]) for each in rows]
    if not all(each.numel() for each in rows):
        return NotImplemented
    with launch.scratch(*contiguous(*expanded)):
        if p == 2 and (mode == 1 or (mode == 0 and any(each.shape[-2] > _FEW_ROWS for each in rows))):
            with launch.inside():
                return _aten._euclidean_dist.default(*expanded)
        return launch.run()
