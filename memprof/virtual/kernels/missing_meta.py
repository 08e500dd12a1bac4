"""Operators that torch has no meta kernel for, and those whose meta kernel takes other memory than CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memprof.trace.events import GPU
from memprof.virtual.card import Card

if TYPE_CHECKING:
    from memprof.virtual.calls import Call, Operator
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")


def geqrf(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """A matrix in columns like the input, and one factor for each reflector (native/BatchLinearAlgebra.cpp, geqrf)."""
    data = call.args[0]
    if not data.is_meta:
        return NotImplemented
    *batch, rows, columns = data.shape
    factored = torch.empty(*batch, columns, rows, dtype=data.dtype, device=_META).mT
    factors = torch.empty(*batch, min(rows, columns), dtype=data.dtype, device=_META)
    mode.record([factored, factors], operator.name, place, call.device or GPU)
    return factored, factors


def zero_tensor(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Zeros that have a shape and no memory on any device (native/TensorFactories.cpp, _efficientzerotensor)."""
    result = call.func(*call.args, **call.kwargs)
    result.untyped_storage().resize_(0)
    return result


def cholesky_solve(args: Any, card: Card) -> list[int]:
    """A copy of the factor in columns, and the error flag (native/cuda/linalg/BatchLinearAlgebra.cpp)."""
    factor = args[1]
    return [factor.numel() * factor.element_size(), 4]


TEMPORARIES: dict[Any, Any] = {_aten._cholesky_solve_helper: cholesky_solve}
HANDLERS: dict[Any, Any] = {
    _aten.geqrf: geqrf,
    _aten._efficientzerotensor: zero_tensor,
}
