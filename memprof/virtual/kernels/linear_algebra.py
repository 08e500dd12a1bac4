"""Solvers, factorisations and distances of linear algebra."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import solver_buffers
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, scratch

_FEW_ROWS = 25


@kernel(aten.geqrf, on_host=True)
def geqrf(launch: KernelContext) -> Any:
    """Make a column-major copy of the matrix and one factor for each reflector (native/BatchLinearAlgebra.cpp,
    geqrf)."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    *batch, rows, columns = data.shape
    factored = torch.empty(*batch, columns, rows, dtype=data.dtype, device=META).mT
    factors = torch.empty(*batch, min(rows, columns), dtype=data.dtype, device=META)
    launch.record(factored, factors)
    return factored, factors


def _count_matrices(matrix: torch.Tensor) -> int:
    return math.prod(matrix.shape[:-2])


def _error_check_bytes(batch: int) -> list[int]:
    """Return the bytes for testing error codes (native/BatchLinearAlgebra.cpp, _linalg_check_errors; one is copied)."""
    return [1] * (2 if batch == 1 else 1)


scratch(aten._linalg_check_errors)(lambda args, gpu: _error_check_bytes(args[0].numel()))
# Copies in columns (native/cuda/linalg/BatchLinearAlgebra.cpp); of one matrix, by cuSOLVER, an error code as well.
input_copies(aten._cholesky_solve_helper)(lambda args: [4] * (_count_matrices(args[0]) == 1))
scratch(aten._cholesky_solve_helper)(lambda args, gpu: [args[1].nbytes])
scratch(aten.cholesky_inverse)(lambda args, gpu: [args[0].nbytes, *[4] * (_count_matrices(args[0]) == 1)])
scratch(aten.linalg_solve_triangular)(
    lambda args, gpu: _triangular_solve_pointers(args[0].shape[-1], _count_matrices(args[1]))
)


def _measured_buffer(gpu: DeviceProperties, num_bytes: int) -> list[int]:
    """Return [num_bytes] of a cuSOLVER buffer on compute capability 9.0, where it was measured; else []."""
    return [num_bytes] * (gpu.compute_capability == (9, 0))


def _assumed_buffer(launch: KernelContext, num_bytes: int) -> list[int]:
    """Return `_measured_buffer`, and add the rule of cuSOLVER's buffers to the report's assumptions."""
    launch.values.assume(solver_buffers.RULE)
    return _measured_buffer(launch.gpu, num_bytes)


@scratch(aten.linalg_cholesky_ex)
def cholesky(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of cuSOLVER's buffer, or of pointers to each of several matrices
    (cuda/linalg/BatchLinearAlgebra.cpp)."""
    batch = _count_matrices(args[0])
    return [8 * batch] if batch > 1 else _measured_buffer(gpu, solver_buffers.potrf_buffer_bytes(args[0].shape[-1]))


@scratch(aten.linalg_ldl_factor_ex)
def ldl_factor(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of cuSOLVER's buffer for LDL factors."""
    return _measured_buffer(gpu, solver_buffers.sytrf_buffer_bytes(args[0].shape[-1], args[0].element_size()))


def _lu_buffers(matrix: torch.Tensor, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of an LU factorization: cuSOLVER's buffer, pointers to each matrix for cuBLAS, or none for MAGMA
    (cuda/linalg/BatchLinearAlgebra.cpp, lu_factor)."""
    (rows, columns), batch = matrix.shape[-2:], _count_matrices(matrix)
    if rows != columns or not (batch == 1 or rows <= 16 or (rows <= 128 and batch <= 16)):
        return []
    return _measured_buffer(gpu, solver_buffers.getrf_buffer_bytes(rows)) if batch == 1 or rows >= 512 else [8 * batch]


scratch(aten.linalg_lu_factor_ex)(lambda args, gpu: _lu_buffers(args[0], gpu))


@scratch(aten.linalg_lu)
def lu(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a copy for the factors, pivots, error codes, and the permutation
    (native/BatchLinearAlgebra.cpp)."""
    matrix = args[0]
    *batch, rows, columns = matrix.shape
    count = math.prod(batch)
    return [matrix.nbytes, 4 * min(rows, columns) * count, 4 * count, *_lu_buffers(matrix, gpu), 8 * rows * count]


def _pivot_sign_buffers(matrix: torch.Tensor) -> list[int]:
    """Return the bytes for the sign of a permutation: row indices, a mask of exchanged rows, the count of exchanges,
    and the mask as 64-bit integers (lu_det_P)."""
    batch, rows = _count_matrices(matrix), matrix.shape[-1]
    return [4 * rows, batch * rows, 8 * batch, 8 * batch * rows]


@scratch(aten._linalg_det)
def determinant(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of error codes, the diagonal's product, and the sign (native/LinearAlgebra.cpp,
    linalg_det_out)."""
    matrix, batch = args[0], _count_matrices(args[0])
    return [4 * batch, *_lu_buffers(matrix, gpu), batch * matrix.element_size(), *_pivot_sign_buffers(matrix)]


@scratch(aten._linalg_slogdet)
def log_determinant(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of error codes, the permutation's sign, the diagonal's signs, their product, and absolute values
    (native/LinearAlgebra.cpp, linalg_slogdet_out)."""
    matrix, batch = args[0], _count_matrices(args[0])
    diagonal, real = batch * matrix.shape[-1], matrix.dtype.to_real().itemsize
    complex_bytes = diagonal * matrix.element_size()
    sign_buffers = [complex_bytes, batch * matrix.element_size(), diagonal * real, complex_bytes * matrix.is_complex()]
    return [4 * batch, *_lu_buffers(matrix, gpu), *_pivot_sign_buffers(matrix), *sign_buffers]


@kernel(aten._linalg_svd)
def singular_vectors(launch: KernelContext) -> Any:
    """Make vectors before values, and allocate error codes, a column-major copy and cuSOLVER's buffer
    (cuda/linalg/BatchLinearAlgebra.cpp, svd_kernel). Without vectors, cuSOLVER still gets buffers for the vectors of
    one matrix, or of all small matrices."""
    matrix = launch.args[0]
    rows, columns = matrix.shape[-2:]
    batch, item_bytes, computes_vectors = (
        _count_matrices(matrix),
        matrix.element_size(),
        launch.argument(2, "compute_uv", True),
    )
    left, values, right = launch.func(*launch.args, **launch.kwargs)
    launch.record(left, right, values)
    num_concurrent = batch if max(rows, columns) <= 32 else 1
    vectors = (
        []
        if computes_vectors
        else [num_concurrent * size * min(rows, columns) * item_bytes for size in (rows, columns)]
    )
    if max(rows, columns) <= 32 and batch > 1 and rows != columns and not launch.argument(1, "full_matrices", False):
        vectors.append(batch * max(rows, columns) ** 2 * item_bytes)  # of the square ones that are computed
    buffer = _assumed_buffer(launch, solver_buffers.gesvdj_buffer_bytes(rows, columns, item_bytes))
    with launch.scratch(4 * batch):
        launch.transients(matrix.nbytes, *vectors, *buffer)
        launch.transients(*_error_check_bytes(batch))
    return left, values, right


@kernel(aten._linalg_eigh)
def eigenvectors_of_symmetric(launch: KernelContext) -> Any:
    """Make vectors and values, and allocate error codes and a buffer for each matrix in turn
    (cuda/linalg/BatchLinearAlgebra.cpp, linalg_eigh_kernel). Without vectors, a copy of the matrix is scratch memory.
    The buffer of batches of small matrices is not counted."""
    matrix = launch.args[0]
    rows, batch, item_bytes = matrix.shape[-1], _count_matrices(matrix), matrix.element_size()
    computes_vectors = launch.argument(2, "compute_v", True)
    values, vectors = launch.func(*launch.args, **launch.kwargs)
    launch.record(*((vectors, values) if computes_vectors else (values,)))
    by_jacobi = matrix.dtype is torch.float32 and 32 <= rows <= 512
    num_bytes = (
        solver_buffers.syevj_buffer_bytes(rows) if by_jacobi else solver_buffers.syevd_buffer_bytes(rows, item_bytes)
    )
    buffers = [] if batch > 1 and rows <= 32 else batch * _assumed_buffer(launch, num_bytes)
    with launch.scratch(0 if computes_vectors else matrix.nbytes, 4 * batch):
        for buffer in buffers:
            launch.transients(buffer)
        launch.transients(*_error_check_bytes(batch))
    return values, vectors


def _compute_values_only(
    operator: Any, option: str, position: int, device_state: DeviceState, *args: Any, **kwargs: Any
) -> Any:
    """Compute values without vectors if no gradient is needed; for meta tensors, torch's C++ computes both."""
    if kwargs or not isinstance(args[0], torch.Tensor) or not device_state.is_on_gpu(args[0]):
        return NotImplemented
    if torch.is_grad_enabled() and args[0].requires_grad:
        return NotImplemented
    return operator(*args, **{option: False})[position]


composite(torch.linalg.svdvals)(partial(_compute_values_only, aten._linalg_svd.default, "compute_uv", 1))
composite(torch.linalg.eigvalsh)(partial(_compute_values_only, aten._linalg_eigh.default, "compute_v", 0))


@kernel(aten.linalg_eig)
def eigenvectors(launch: KernelContext) -> Any:
    """Check that all elements are finite, and compute complex vectors and values in temporaries; for real matrices also
    real ones, and whether any value is complex (native/BatchLinearAlgebra.cpp, linalg_eig_out).

    Recorded with torch 2.11; earlier releases compute them on the host.
    """
    matrix = launch.args[0]
    if launch.gpu.release < (2, 11):
        return NotImplemented
    batch, rows, item_bytes = _count_matrices(matrix), matrix.shape[-1], matrix.element_size()
    num_values, complex_bytes = batch * rows, matrix.dtype.to_complex().itemsize
    with launch.inside():
        aten.all.default(aten.isfinite.default(matrix))
    real = [] if matrix.is_complex() else [num_values * complex_bytes, matrix.nbytes]
    with launch.scratch(4 * batch, num_values * rows * complex_bytes, num_values * complex_bytes):
        with launch.scratch(*real):
            launch.transients(
                matrix.nbytes, *_assumed_buffer(launch, solver_buffers.geev_buffer_bytes(rows, item_bytes))
            )
            launch.transients(*[num_values, 1] * bool(real))
        result = launch.run()
        launch.transients(*_error_check_bytes(batch))
    return result


@kernel(aten.linalg_qr)
def qr(launch: KernelContext) -> Any:
    """Compute reflectors in place in a wide enough orthogonal matrix or in the triangular one, else in a copy
    (native/BatchLinearAlgebra.cpp, linalg_qr_out)."""
    matrix, mode = launch.args[0], launch.argument(1, "mode", "reduced")
    (rows, columns), min_dim = matrix.shape[-2:], min(matrix.shape[-2:])
    result = launch.run()
    size, batch = matrix.element_size(), _count_matrices(matrix)
    has_room_for_reflectors = (mode != "r" and result[0].shape[-1] == columns) or result[1].shape[-2] == rows
    with launch.scratch(min_dim * batch * size, 0 if has_room_for_reflectors else matrix.nbytes):
        _allocate_for_reflectors(launch, rows, columns, batch, size)
        if mode != "r":
            buffer = _assumed_buffer(
                launch, solver_buffers.orgqr_buffer_bytes(rows, result[0].shape[-1], min_dim, size)
            )
            _allocate_per_matrix(launch, batch, buffer)
    return result


def _allocate_for_reflectors(launch: KernelContext, rows: int, columns: int, batch: int, item_bytes: int) -> None:
    """Allocate two pointers for each of many small matrices, or cuSOLVER's buffer for each matrix in turn
    (cuda/linalg/BatchLinearAlgebra.cpp, geqrf_kernel)."""
    if _is_batched_by_cublas(rows, batch):
        launch.transients(8 * batch, 8 * batch)
    else:
        _allocate_per_matrix(
            launch, batch, _assumed_buffer(launch, solver_buffers.geqrf_buffer_bytes(columns, item_bytes))
        )


def _is_batched_by_cublas(rows: int, batch: int) -> bool:
    return rows <= 256 and batch >= max(2, rows // 16)


def _allocate_per_matrix(launch: KernelContext, batch: int, buffer: list[int]) -> None:
    """Allocate an error code, and for each matrix in turn `buffer`."""
    with launch.scratch(4):
        for _ in range(batch):
            launch.transients(*buffer)


@scratch(aten.linalg_inv_ex)
def inverse(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a copy for the factors, of pivots, and of solving for the identity
    (native/BatchLinearAlgebra.cpp)."""
    *batch, rows, _ = args[0].shape
    count = math.prod(batch)
    buffers = _lu_solve_buffers(rows, rows, count, args[0].element_size())
    return [args[0].nbytes, 4 * rows * count, *_lu_buffers(args[0], gpu), *buffers]


@scratch(aten._linalg_solve_ex)
def solve(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the factorization, of a copied vector, and of solving with the factors, which are a
    result."""
    matrix, other = args[:2]
    is_vector = other.dim() == 1 or other.shape == matrix.shape[:-1]
    batch = torch.broadcast_shapes(matrix.shape[:-2], other.shape[:-1] if is_vector else other.shape[:-2])
    num_sides = 1 if is_vector else other.shape[-1 if len(args) < 3 or args[2] else -2]
    copy_bytes = [other.nbytes] * is_vector
    return [
        *_lu_buffers(matrix, gpu), *copy_bytes,
        *_lu_solve_buffers(matrix.shape[-1], num_sides, math.prod(batch), matrix.element_size()),
    ]  # fmt: skip


def _triangular_solve_pointers(rows: int, batch: int) -> list[int]:
    """Return the bytes of two pointers per matrix for cuBLAS's batched solve; [] where matrices are solved one by one
    (cuda/linalg/BatchLinearAlgebra.cpp, triangular_solve_kernel)."""
    return [] if (batch <= 8 and rows >= 64) or rows > 512 else [8 * batch] * 2


def _lu_solve_buffers(rows: int, num_sides: int, batch: int, item_bytes: int) -> list[int]:
    """Return the bytes of solving with LU factors: triangular solves of permuted rows, cuBLAS with pointers to each
    matrix, or cuSOLVER with an error code (native/cuda/linalg/BatchLinearAlgebra.cpp, lu_solve_kernel)."""
    if rows == num_sides:
        looped, triangular = False, rows > 16
    elif rows <= 64:
        looped = rows > 8 and batch <= 2 and (num_sides <= 64 or rows <= 32)
        triangular = rows > 8 and not looped and num_sides > 8
    else:
        looped = rows <= 128 and batch <= 2 and num_sides <= 2
        triangular = rows > 128 or num_sides > 2
    if not triangular:
        return [4] if looped else [8 * batch] * 2
    order, orders = 8 * rows, 8 * rows * batch
    permuted_bytes = rows * num_sides * batch * item_bytes
    return [order, *[orders] * (batch > 1), order, orders, permuted_bytes, *2 * _triangular_solve_pointers(rows, batch)]


@kernel(aten.linalg_lstsq)
def lstsq(launch: KernelContext) -> Any:
    """Solve least squares by QR ("gels"), the only driver on a GPU, which computes no rank and no singular values.

    The solution is a part of a column-major matrix, whose other rows give the residuals. Temporaries are an error code
    for each matrix, a column-major copy of the matrices and a factor for each reflector; transposes of wide matrices;
    and copies for each right-hand side where several share a matrix (native/BatchLinearAlgebra.cpp,
    linalg_lstsq_out_info; native/cuda/linalg/BatchLinearAlgebra.cpp, linalg_lstsq_gels).

    Raises:
        RuntimeError: torch's message for another driver, or for shapes that do not match.
    """
    matrix, other = launch.args[:2]
    if (launch.kwargs.get("driver") or "gels").lower() != "gels":
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    _check_lstsq(matrix, other)
    *batch, rows, columns = matrix.shape
    is_vector = other.dim() == matrix.dim() - 1
    *batch_of_other, _, num_sides = (*other.shape, 1) if is_vector else other.shape
    full_batch = torch.broadcast_shapes(batch, batch_of_other)
    count, max_dim, min_dim = math.prod(batch), max(rows, columns), min(rows, columns)
    size = matrix.element_size()
    with launch.scratch(4 * max(1, count)):
        solution = launch.new((*full_batch, num_sides, max_dim), matrix.dtype).mT
        num_systems = math.prod(full_batch)
        with launch.scratch(matrix.numel() * size):
            if rows >= columns and _is_batched_by_cublas(rows, num_systems):  # gels_batched_cublas
                launch.transients(num_systems * rows * columns * size, 8 * num_systems, 8 * num_systems)
            else:
                with launch.scratch(count * min_dim * size, matrix.numel() * size * (rows < columns)):
                    _allocate_for_reflectors(launch, max_dim, min_dim, count, size)
                    copy_bytes = (num_systems * max_dim * min_dim * size, num_systems * min_dim * size)
                    with launch.scratch(*copy_bytes * (tuple(batch) != tuple(full_batch))):
                        triangular = _triangular_solve_pointers(min_dim, num_systems)
                        launch.transients(*triangular * (rows < columns))
                        num_bytes = solver_buffers.ormqr_buffer_bytes(max_dim, min_dim, num_sides, size)
                        _allocate_per_matrix(launch, num_systems, _assumed_buffer(launch, num_bytes))
                        launch.transients(*triangular * (rows >= columns))
        real = matrix.dtype.to_real()
        residuals = launch.new((*full_batch, num_sides) if rows > columns else (0,), real)
        launch.transients(*_error_check_bytes(max(1, count)))
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
