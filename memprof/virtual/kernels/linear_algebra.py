"""Linear algebra on CUDA: temporaries of solvers, factorizations and distances."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from memprof.allocator.releases import Change
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import solver_buffers
from memprof.virtual.kernels.copies import copy_bytes
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, scratch

_MAX_FEW_ROWS = 25


@kernel(aten.geqrf, on_host=True)
def geqrf(launch: KernelContext) -> Any:
    """Allocate a column-major copy for the reflectors, and `tau`, a factor per reflector (BatchLinearAlgebra.cpp)."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    *batch, rows, columns = data.shape
    reflectors = torch.empty(*batch, columns, rows, dtype=data.dtype, device=META).mT
    tau = torch.empty(*batch, min(rows, columns), dtype=data.dtype, device=META)
    launch.record(reflectors, tau)
    return reflectors, tau


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
    """Return [`num_bytes`] for a cuSOLVER buffer on compute capability 9.0, where it was measured; else []."""
    return [num_bytes] * (gpu.compute_capability == (9, 0))


def _assumed_buffer(launch: KernelContext, num_bytes: int) -> list[int]:
    """Return `_measured_buffer(gpu, num_bytes)`, and add the rule for cuSOLVER's buffers to the report."""
    launch.values.assume(solver_buffers.BUFFERS_ASSUMPTION)
    return _measured_buffer(launch.gpu, num_bytes)


@scratch(aten.linalg_cholesky_ex)
def compute_cholesky_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of cuSOLVER's buffer for one matrix, or of a pointer to each of several matrices."""
    batch = _count_matrices(args[0])
    return [8 * batch] if batch > 1 else _measured_buffer(gpu, solver_buffers.potrf_buffer_bytes(args[0].shape[-1]))


@scratch(aten.linalg_ldl_factor_ex)
def compute_ldl_factor_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of cuSOLVER's buffer for an LDL factorization."""
    return _measured_buffer(gpu, solver_buffers.sytrf_buffer_bytes(args[0].shape[-1], args[0].element_size()))


def _lu_buffers(matrix: torch.Tensor, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the buffers of an LU factorization: cuSOLVER's buffer, cuBLAS's pointers to each matrix, or
    none for MAGMA (cuda/linalg/BatchLinearAlgebra.cpp, lu_factor)."""
    (rows, columns), batch = matrix.shape[-2:], _count_matrices(matrix)
    if rows != columns or not (batch == 1 or rows <= 16 or (rows <= 128 and batch <= 16)):
        return []
    return _measured_buffer(gpu, solver_buffers.getrf_buffer_bytes(rows)) if batch == 1 else [8 * batch]


scratch(aten.linalg_lu_factor_ex)(lambda args, gpu: _lu_buffers(args[0], gpu))


@scratch(aten.linalg_lu)
def compute_lu_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a copy of the matrix for the factors, of pivots, error codes, LU buffers and permutation."""
    matrix = args[0]
    *batch, rows, columns = matrix.shape
    count = math.prod(batch)
    return [matrix.nbytes, 4 * min(rows, columns) * count, 4 * count, *_lu_buffers(matrix, gpu), 8 * rows * count]


def _pivot_sign_buffers(matrix: torch.Tensor) -> list[int]:
    """Return the bytes of the buffers for the sign of the row permutation: row indices, a mask of exchanged rows, the
    number of exchanges, and the mask as int64 (lu_det_P)."""
    batch, rows = _count_matrices(matrix), matrix.shape[-1]
    return [4 * rows, batch * rows, 8 * batch, 8 * batch * rows]


@scratch(aten._linalg_det)
def compute_det_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of error codes, LU buffers, the diagonal's product and the permutation's sign
    (linalg_det_out)."""
    matrix, batch = args[0], _count_matrices(args[0])
    return [4 * batch, *_lu_buffers(matrix, gpu), batch * matrix.element_size(), *_pivot_sign_buffers(matrix)]


@scratch(aten._linalg_slogdet)
def compute_slogdet_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of error codes, LU buffers, the permutation's sign, the signs of the diagonal, their product,
    and absolute values (native/LinearAlgebra.cpp, linalg_slogdet_out)."""
    matrix, batch = args[0], _count_matrices(args[0])
    diagonal, real_size = batch * matrix.shape[-1], matrix.dtype.to_real().itemsize
    complex_bytes = diagonal * matrix.element_size()
    sign_buffers = [complex_bytes, batch * matrix.element_size(), diagonal * real_size]
    sign_buffers.append(complex_bytes * matrix.is_complex())
    return [4 * batch, *_lu_buffers(matrix, gpu), *_pivot_sign_buffers(matrix), *sign_buffers]


@kernel(aten._linalg_svd)
def svd(launch: KernelContext) -> Any:
    """Allocate singular vectors before singular values, then error codes, a column-major copy and cuSOLVER's buffer
    (cuda/linalg/BatchLinearAlgebra.cpp, svd_kernel). With compute_uv=False, cuSOLVER still gets buffers for the vectors
    of one matrix, or of all matrices in a batch of small ones."""
    matrix = launch.args[0]
    rows, columns = matrix.shape[-2:]
    batch, item_bytes = _count_matrices(matrix), matrix.element_size()
    computes_vectors = launch.argument(2, "compute_uv", True)
    u, s, vh = launch.func(*launch.args, **launch.kwargs)
    launch.record(u, vh, s)
    num_concurrent = batch if max(rows, columns) <= 32 else 1
    sizes = () if computes_vectors else (rows, columns)
    vector_buffers = [num_concurrent * size * min(rows, columns) * item_bytes for size in sizes]
    if max(rows, columns) <= 32 and batch > 1 and rows != columns and not launch.argument(1, "full_matrices", False):
        vector_buffers.append(batch * max(rows, columns) ** 2 * item_bytes)  # of the square ones that are computed
    buffer = _assumed_buffer(launch, solver_buffers.gesvdj_buffer_bytes(rows, columns, item_bytes))
    with launch.scratch(4 * batch):
        launch.transients(matrix.nbytes, *vector_buffers, *buffer)
        launch.transients(*_error_check_bytes(batch))
    return u, s, vh


@kernel(aten._linalg_eigh)
def eigh(launch: KernelContext) -> Any:
    """Allocate eigenvectors and eigenvalues, then error codes and a buffer for each matrix in turn
    (cuda/linalg/BatchLinearAlgebra.cpp, linalg_eigh_kernel). With compute_v=False, a copy of the matrix is scratch
    memory. The buffer of batches of small matrices is not counted."""
    matrix = launch.args[0]
    rows, batch, item_bytes = matrix.shape[-1], _count_matrices(matrix), matrix.element_size()
    computes_vectors = launch.argument(2, "compute_v", True)
    values, vectors = launch.func(*launch.args, **launch.kwargs)
    launch.record(*((vectors, values) if computes_vectors else (values,)))
    uses_jacobi = matrix.dtype is torch.float32 and 32 <= rows <= 512
    num_bytes = (
        solver_buffers.syevj_buffer_bytes(rows) if uses_jacobi else solver_buffers.syevd_buffer_bytes(rows, item_bytes)
    )
    buffers = [] if batch > 1 and rows <= 32 else batch * _assumed_buffer(launch, num_bytes)
    with launch.scratch(0 if computes_vectors else matrix.nbytes, 4 * batch):
        for buffer in buffers:
            launch.transients(buffer)
        launch.transients(*_error_check_bytes(batch))
    return values, vectors


def _compute_values_only(
    operator: Any, vectors_option: str, values_position: int, device_state: DeviceState, *args: Any, **kwargs: Any
) -> Any:
    """Run `operator` without vectors if no gradient is needed; for meta tensors, torch's C++ always computes them."""
    if kwargs or not isinstance(args[0], torch.Tensor) or not device_state.is_on_gpu(args[0]):
        return NotImplemented
    if torch.is_grad_enabled() and args[0].requires_grad:
        return NotImplemented
    return operator(*args, **{vectors_option: False})[values_position]


composite(torch.linalg.svdvals)(partial(_compute_values_only, aten._linalg_svd.default, "compute_uv", 1))
composite(torch.linalg.eigvalsh)(partial(_compute_values_only, aten._linalg_eigh.default, "compute_v", 0))


@kernel(aten.linalg_eig)
def eig(launch: KernelContext) -> Any:
    """Check that all elements are finite, and compute complex eigenvectors and eigenvalues in temporaries; for real
    matrices also real temporaries, and a check for complex eigenvalues (native/BatchLinearAlgebra.cpp, linalg_eig_out).

    Earlier releases compute eigenvalues on the host.
    """
    matrix = launch.args[0]
    if not Change.EIGENVALUES_ON_GPU.is_in(launch.gpu.release):
        return NotImplemented
    batch, rows, item_bytes = _count_matrices(matrix), matrix.shape[-1], matrix.element_size()
    num_values, complex_bytes = batch * rows, matrix.dtype.to_complex().itemsize
    with launch.inside():
        aten.all.default(aten.isfinite.default(matrix))
    real_buffers = [] if matrix.is_complex() else [num_values * complex_bytes, matrix.nbytes]
    with launch.scratch(4 * batch, num_values * rows * complex_bytes, num_values * complex_bytes):
        with launch.scratch(*real_buffers):
            launch.transients(
                matrix.nbytes, *_assumed_buffer(launch, solver_buffers.geev_buffer_bytes(rows, item_bytes))
            )
            launch.transients(*[num_values, 1] * bool(real_buffers))
        result = launch.run()
        launch.transients(*_error_check_bytes(batch))
    return result


@kernel(aten.linalg_qr)
def qr(launch: KernelContext) -> Any:
    """Allocate the results; Householder reflectors are computed in the orthogonal or the triangular matrix if one has
    the shape of the input, else in a copy (native/BatchLinearAlgebra.cpp, linalg_qr_out)."""
    matrix, mode = launch.args[0], launch.argument(1, "mode", "reduced")
    (rows, columns), min_dim = matrix.shape[-2:], min(matrix.shape[-2:])
    result = launch.run()
    item_bytes, batch = matrix.element_size(), _count_matrices(matrix)
    has_room_for_reflectors = (mode != "r" and result[0].shape[-1] == columns) or result[1].shape[-2] == rows
    with launch.scratch(min_dim * batch * item_bytes, 0 if has_room_for_reflectors else matrix.nbytes):
        _allocate_for_reflectors(launch, rows, columns, batch, item_bytes)
        if mode != "r":
            buffer = _assumed_buffer(
                launch, solver_buffers.orgqr_buffer_bytes(rows, result[0].shape[-1], min_dim, item_bytes)
            )
            _allocate_per_matrix(launch, batch, buffer)
    return result


def _allocate_for_reflectors(launch: KernelContext, rows: int, columns: int, batch: int, item_bytes: int) -> None:
    """Allocate cuBLAS's two pointers per matrix for a batch of many small matrices, or cuSOLVER's buffer for each
    matrix in turn (cuda/linalg/BatchLinearAlgebra.cpp, geqrf_kernel)."""
    if _is_batched_by_cublas(rows, batch):
        launch.transients(8 * batch, 8 * batch)
    else:
        _allocate_per_matrix(
            launch, batch, _assumed_buffer(launch, solver_buffers.geqrf_buffer_bytes(columns, item_bytes))
        )


def _is_batched_by_cublas(rows: int, batch: int) -> bool:
    return rows <= 256 and batch >= max(2, rows // 16)


def _allocate_per_matrix(launch: KernelContext, batch: int, buffer: list[int]) -> None:
    """Allocate an error code, and `buffer` (bytes) once for each matrix of the batch, in turn."""
    with launch.scratch(4):
        for _ in range(batch):
            launch.transients(*buffer)


@scratch(aten.linalg_inv_ex)
def compute_inverse_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a copy of the matrix for the factors, of pivots, LU buffers, and the solve for the
    identity."""
    *batch, rows, _ = args[0].shape
    count = math.prod(batch)
    buffers = _lu_solve_buffers(rows, rows, count, args[0].element_size())
    return [args[0].nbytes, 4 * rows * count, *_lu_buffers(args[0], gpu), *buffers]


@scratch(aten._linalg_solve_ex)
def compute_solve_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the LU factorization, of a copy of a vector right-hand side, and of the solve."""
    matrix, rhs = args[:2]
    is_vector = rhs.dim() == 1 or rhs.shape == matrix.shape[:-1]
    batch = torch.broadcast_shapes(matrix.shape[:-2], rhs.shape[:-1] if is_vector else rhs.shape[:-2])
    num_rhs = 1 if is_vector else rhs.shape[-1 if len(args) < 3 or args[2] else -2]
    vector_copies = [rhs.nbytes] * is_vector
    return [
        *_lu_buffers(matrix, gpu), *vector_copies,
        *_lu_solve_buffers(matrix.shape[-1], num_rhs, math.prod(batch), matrix.element_size()),
    ]  # fmt: skip


def _triangular_solve_pointers(rows: int, batch: int) -> list[int]:
    """Return the bytes of two pointers per matrix for cuBLAS's batched solve; [] where matrices are solved one by one
    (cuda/linalg/BatchLinearAlgebra.cpp, triangular_solve_kernel)."""
    return [] if (batch <= 8 and rows >= 64) or rows > 512 else [8 * batch] * 2


def _lu_solve_buffers(rows: int, num_rhs: int, batch: int, item_bytes: int) -> list[int]:
    """Return the bytes of buffers for a solve with LU factors: triangular solves of permuted rows, cuBLAS's pointers to
    each matrix, or cuSOLVER's error code (native/cuda/linalg/BatchLinearAlgebra.cpp, lu_solve_kernel)."""
    if rows == num_rhs:
        is_looped, uses_triangular_solves = False, rows > 16
    elif rows <= 64:
        is_looped = rows > 8 and batch <= 2 and (num_rhs <= 64 or rows <= 32)
        uses_triangular_solves = rows > 8 and not is_looped and num_rhs > 8
    else:
        is_looped = rows <= 128 and batch <= 2 and num_rhs <= 2
        uses_triangular_solves = rows > 128 or num_rhs > 2
    if not uses_triangular_solves:
        return [4] if is_looped else [8 * batch] * 2
    row_bytes, index_bytes = 8 * rows, 8 * rows * batch
    index_buffers = [row_bytes, *[index_bytes] * (batch > 1), row_bytes, index_bytes]
    return [*index_buffers, rows * num_rhs * batch * item_bytes, *2 * _triangular_solve_pointers(rows, batch)]


@kernel(aten.linalg_lstsq)
def lstsq(launch: KernelContext) -> Any:
    """Solve least squares by QR ("gels"), the only driver on a GPU, which computes neither rank nor singular values.

    The solution is the upper part of a column-major matrix whose other rows give the residuals. Temporaries are an
    error code for each matrix, a column-major copy of the matrices and a factor for each reflector; transposes of wide
    matrices; and copies for each right-hand side where several share a matrix (native/BatchLinearAlgebra.cpp,
    linalg_lstsq_out_info; native/cuda/linalg/BatchLinearAlgebra.cpp, linalg_lstsq_gels).

    Raises:
        RuntimeError: torch's message for another driver, or for shapes that do not match.
    """
    matrix, rhs = launch.args[:2]
    if (launch.kwargs.get("driver") or "gels").lower() != "gels":
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    _check_lstsq(matrix, rhs)
    *batch, rows, columns = matrix.shape
    is_vector = rhs.dim() == matrix.dim() - 1
    *rhs_batch, _, num_rhs = (*rhs.shape, 1) if is_vector else rhs.shape
    common_batch = torch.broadcast_shapes(batch, rhs_batch)
    count, max_dim, min_dim = math.prod(batch), max(rows, columns), min(rows, columns)
    item_bytes = matrix.element_size()
    with launch.scratch(4 * max(1, count)):
        solution = launch.new((*common_batch, num_rhs, max_dim), matrix.dtype).mT
        num_systems = math.prod(common_batch)
        with launch.scratch(matrix.numel() * item_bytes):
            if rows >= columns and _is_batched_by_cublas(rows, num_systems):  # gels_batched_cublas
                launch.transients(num_systems * rows * columns * item_bytes, 8 * num_systems, 8 * num_systems)
            else:
                with launch.scratch(count * min_dim * item_bytes, matrix.numel() * item_bytes * (rows < columns)):
                    _allocate_for_reflectors(launch, max_dim, min_dim, count, item_bytes)
                    copied_bytes = (num_systems * max_dim * min_dim * item_bytes, num_systems * min_dim * item_bytes)
                    with launch.scratch(*copied_bytes * (tuple(batch) != tuple(common_batch))):
                        pointer_buffers = _triangular_solve_pointers(min_dim, num_systems)
                        launch.transients(*pointer_buffers * (rows < columns))
                        num_bytes = solver_buffers.ormqr_buffer_bytes(max_dim, min_dim, num_rhs, item_bytes)
                        _allocate_per_matrix(launch, num_systems, _assumed_buffer(launch, num_bytes))
                        launch.transients(*pointer_buffers * (rows >= columns))
        real_dtype = matrix.dtype.to_real()
        residuals = launch.new((*common_batch, num_rhs) if rows > columns else (0,), real_dtype)
        launch.transients(*_error_check_bytes(max(1, count)))
    solution = solution[..., :columns, :]
    solution = solution.squeeze(-1) if is_vector else solution
    return solution, residuals, launch.new((0,), torch.long), launch.new((0,), real_dtype)


def _check_lstsq(matrix: torch.Tensor, rhs: torch.Tensor) -> None:
    prefix = "torch.linalg.lstsq: "
    if matrix.dim() < 2:
        raise RuntimeError(f"{prefix}input must have at least 2 dimensions.")
    if matrix.dtype is not rhs.dtype:
        mismatch = f"but got input's dtype {matrix.dtype} and other's dtype {rhs.dtype}"
        raise RuntimeError(f"{prefix}Expected input and other to have the same dtype, {mismatch}")
    num_missing_dims = matrix.dim() - rhs.dim()
    if rhs.dim() < 1 or num_missing_dims not in (0, 1):
        condition = "input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1"
        raise RuntimeError(f"{prefix}{condition}")
    rows_dim = -1 if num_missing_dims else -2
    if matrix.size(-2) != rhs.size(rows_dim):
        raise RuntimeError(f"{prefix}input.size(-2) should match other.size({rows_dim})")


@kernel(aten._cdist_forward)
def cdist(launch: KernelContext) -> Any:
    """Compute distances of rows, with expanded contiguous batches; for many rows by a matrix product (Distance.cpp)."""
    *inputs, p = launch.args[:3]
    mode = launch.argument(3, "compute_mode") or 0
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in inputs))
    expanded = [t.expand(*batch, *t.shape[-2:]) for t in inputs]
    if not all(t.numel() for t in inputs):
        return NotImplemented
    with launch.scratch(*copy_bytes(*expanded)):
        if p == 2 and (mode == 1 or (mode == 0 and any(t.shape[-2] > _MAX_FEW_ROWS for t in inputs))):
            with launch.inside():
                return aten._euclidean_dist.default(*expanded)
        return launch.run()
