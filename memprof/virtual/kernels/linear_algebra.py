"""Solvers and factorisations of linear algebra."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.registry import kernel, scratch
from memprof.virtual.launch import Launch

_aten = torch.ops.aten
_META = torch.device("meta")


@kernel(_aten.geqrf, on_host=True)
def geqrf(launch: Launch) -> Any:
    """A matrix in columns like the input, and one factor for each reflector (native/BatchLinearAlgebra.cpp, geqrf)."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    *batch, rows, columns = data.shape
    factored = torch.empty(*batch, columns, rows, dtype=data.dtype, device=_META).mT
    factors = torch.empty(*batch, min(rows, columns), dtype=data.dtype, device=_META)
    launch.record(factored, factors)
    return factored, factors


@scratch(_aten._cholesky_solve_helper)
def cholesky_solve(args: Any, card: Card) -> list[int]:
    """A copy of the factor in columns, and the error flag (native/cuda/linalg/BatchLinearAlgebra.cpp)."""
    factor = args[1]
    return [factor.numel() * factor.element_size(), 4]
