"""Solvers, factorisations and distances of linear algebra."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import META, aten, kernel, scratch

_FEW_ROWS = 25


@kernel(aten.geqrf, on_host=True)
def geqrf(launch: KernelContext) -> Any:
    """A matrix in columns like the input, and one factor for each reflector (native/BatchLinearAlgebra.cpp, geqrf)."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    *batch, rows, columns = data.shape
    factored = torch.empty(*batch, columns, rows, dtype=data.dtype, device=META).mT
    factors = torch.empty(*batch, min(rows, columns), dtype=data.dtype, device=META)
    launch.record(factored, factors)
    return factored, factors


# A copy of the factor in columns, and the error flag (native/cuda/linalg/BatchLinearAlgebra.cpp).
scratch(aten._cholesky_solve_helper)(lambda args, gpu: [args[1].nbytes, 4])
# A copy of the matrices in columns. cuSOLVER's workspaces are not counted, here and below.
scratch(aten._linalg_svd, aten.linalg_lu)(lambda args, gpu: [args[0].nbytes])


@scratch(aten.linalg_inv_ex)
def inverse(args: Any, gpu: DeviceProperties) -> list[int]:
    """Factors in a copy, their pivots, and what solving for the identity takes (native/BatchLinearAlgebra.cpp)."""
    *batch, rows, _ = args[0].shape
    count = math.prod(batch)
    return [args[0].nbytes, 4 * rows * count, *_lu_solve_buffers(rows, rows, count, args[0].element_size())]


@scratch(aten._linalg_solve_ex)
def solve(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return what solving with the factors takes; the factors are a result."""
    matrix, other = args[:2]
    is_vector = other.dim() == 1 or other.shape == matrix.shape[:-1]
    batch = torch.broadcast_shapes(matrix.shape[:-2], other.shape[:-1] if is_vector else other.shape[:-2])
    sides = 1 if is_vector else other.shape[-1 if len(args) < 3 or args[2] else -2]
    return _lu_solve_buffers(matrix.shape[-1], sides, math.prod(batch), matrix.element_size())


def _lu_solve_buffers(rows: int, sides: int, batch: int, item_bytes: int) -> list[int]:
    """native/cuda/linalg/BatchLinearAlgebra.cpp, lu_solve_kernel: by triangular solves with the rows exchanged, or few
    at a time by cuBLAS, with pointers to each."""
    if rows == sides:
        looped, triangular = False, rows > 16
    elif rows <= 64:
        looped = rows > 8 and batch <= 2 and (sides <= 64 or rows <= 32)
        triangular = rows > 8 and not looped and sides > 8
    else:
        looped = rows <= 128 and batch <= 2 and sides <= 2
        triangular = rows > 128 or sides > 2
    if not triangular:
        return [] if looped else [8 * batch] * 2
    order, orders = 8 * rows, 8 * rows * batch
    return [order, *[orders] * (batch > 1), order, orders, rows * sides * batch * item_bytes]


@kernel(aten.linalg_lstsq)
def lstsq(launch: KernelContext) -> Any:
    """Solve least squares by QR ("gels"), which is the one driver on a GPU and finds no rank and no singular values.

    The solution is a part of a matrix in columns whose other rows the residuals are taken from; beside it are an error
    flag for each matrix, a copy of the matrices in columns and a factor for each of their reflectors; where they are
    wider than high their transposes too, and for each right-hand side one where several share a matrix
    (native/BatchLinearAlgebra.cpp, linalg_lstsq_out_info; native/cuda/linalg/BatchLinearAlgebra.cpp,
    linalg_lstsq_gels).

    Raises:
        RuntimeError: as torch says it, of another driver and of shapes that do not go together.
    """
    matrix, other = launch.args[:2]
    if (launch.kwargs.get("driver") or "gels").lower() != "gels":
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    _check_lstsq(matrix, other)
    *batch, rows, columns = matrix.shape
    is_vector = other.dim() == matrix.dim() - 1
    *batch_of_other, _, sides = (*other.shape, 1) if is_vector else other.shape
    whole = torch.broadcast_shapes(batch, batch_of_other)
    count, most, least = math.prod(batch), max(rows, columns), min(rows, columns)
    size = matrix.element_size()
    with launch.scratch(4 * max(1, count)):
        solution = launch.new((*whole, sides, most), matrix.dtype).mT
        with launch.scratch(matrix.numel() * size, count * least * size, matrix.numel() * size * (rows < columns)):
            if tuple(batch) != tuple(whole):
                launch.transients(math.prod(whole) * most * least * size, math.prod(whole) * least * size)
        real = matrix.dtype.to_real()
        residuals = launch.new((*whole, sides) if rows > columns else (0,), real)
    solution = solution[..., :columns, :]
    solution = solution.squeeze(-1) if is_vector else solution
    return solution, residuals, launch.new((0,), torch.long), launch.new((0,), real)


def _check_lstsq(matrix: torch.Tensor, other: torch.Tensor) -> None:
    name = "torch.linalg.lstsq: "
    if matrix.dim() < 2:
        raise RuntimeError(f"{name}input must have at least 2 dimensions.")
    if matrix.dtype is not other.dtype:
        found = f"but got input's dtype {matrix.dtype} and other's dtype {other.dtype}"
        raise RuntimeError(f"{name}Expected input and other to have the same dtype, {found}")
    missing = matrix.dim() - other.dim()
    if other.dim() < 1 or missing not in (0, 1):
        dims = "input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1"
        raise RuntimeError(f"{name}{dims}")
    rows = -1 if missing else -2
    if matrix.size(-2) != other.size(rows):
        raise RuntimeError(f"{name}input.size(-2) should match other.size({rows})")


@kernel(aten._cdist_forward)
def cdist(launch: KernelContext) -> Any:
    """Compare batches made equal and contiguous; many rows by a matrix product (native/Distance.cpp, cdist_impl)."""
    *rows, p = launch.args[:3]
    mode = launch.argument(3, "compute_mode") or 0
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in rows))
    expanded = [each.expand(*batch, *each.shape[-2:]) for each in rows]
    if not all(each.numel() for each in rows):
        return NotImplemented
    with launch.scratch(*contiguous(*expanded)):
        if p == 2 and (mode == 1 or (mode == 0 and any(each.shape[-2] > _FEW_ROWS for each in rows))):
            with launch.inside():
                return aten._euclidean_dist.default(*expanded)
        return launch.run()
