"""Sparse tensors on the GPU: torch's sparse meta tensors, whose indices and values are recorded tensors.

The number of nonzero elements is taken from known values. If the values are unknown, all count as nonzero, an upper
bound of the memory. Sparse CPU tensors are torch's own. Sources: native/sparse/SparseTensor.cpp,
native/sparse/cuda/SparseCUDATensor.cu and SparseCUDATensorMath.cu.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from memprof.trace.events import HOST
from memprof.virtual.device_state import REAL
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.indexing import make_embedding_bag_gradient
from memprof.virtual.kernels.registry import META, OperatorTable, aten, kernel
from memprof.virtual.kernels.sorting import radix_sort_bytes
from memprof.virtual.kernels.transfers import copies_gradient_of_real_tensor
from memprof.watch.wrappers import get_sparse_parts

# Function of (launch), called where an operand is sparse and virtual, or a sparse result is to be made of one.
sparse_kernel = OperatorTable("kernel for sparse tensors")


def _replace_parts(sparse: torch.Tensor, parts: list[torch.Tensor], size: Any = None, coalesced: bool = False) -> Any:
    """Return a sparse tensor with the layout of `sparse` and `parts`: its new indices, and last its values."""
    sparse_dims = sparse.sparse_dim() if len(parts) == 2 else 0
    return _make_sparse(sparse.layout, sparse_dims, parts, size or sparse.size(), coalesced)


def _make_sparse(layout: torch.layout, sparse_dims: int, parts: list[torch.Tensor], size: Any, coalesced: bool) -> Any:
    """Return a sparse tensor of `parts`: indices (two tensors for CSR, row offsets and columns), and last values."""
    values = parts[-1]
    options: dict[str, Any] = {"dtype": values.dtype, "layout": layout, "device": values.device}
    if len(parts) == 3:
        return aten._sparse_compressed_tensor_unsafe.default(*parts, size, **options)
    num_dims = sparse_dims, len(size) - sparse_dims
    make = aten._sparse_coo_tensor_with_dims_and_tensors.default
    return make(*num_dims, size, *parts, **options, is_coalesced=coalesced)


@sparse_kernel(aten._to_copy, aten.clone)
def copy(launch: KernelContext) -> Any:
    """Copy indices and values to a device; a new dtype applies to the values only."""
    sparse, kwargs = launch.args[0], {k: v for k, v in launch.kwargs.items() if k in ("device", "dtype")}
    *indices, values = get_sparse_parts(sparse)
    index_kwargs = {k: v for k, v in kwargs.items() if k == "device"}
    is_coalesced = sparse.layout is torch.sparse_coo and sparse.is_coalesced()
    if values.is_meta and kwargs.get("device") == torch.device("cpu"):
        # A copy on the host is virtual, its indices as well, if its values are not known.
        with (
            launch.inside(),
            launch.device_state.factory_device_as(REAL)
            if copies_gradient_of_real_tensor(launch)
            else contextlib.nullcontext(),
        ):
            copied_values = launch.func(values, **kwargs)
        with launch.inside(), launch.device_state.factory_device_as(HOST if copied_values.is_meta else REAL):
            parts = [*(launch.func(index, device=copied_values.device) for index in indices), copied_values]
    else:
        with launch.inside():
            parts = [launch.func(index, **index_kwargs) for index in indices] + [launch.func(values, **kwargs)]
    return _replace_parts(sparse, parts, coalesced=is_coalesced)


@sparse_kernel(aten._sparse_coo_tensor_with_dims_and_tensors, aten._sparse_compressed_tensor_unsafe, aten.detach)
@sparse_kernel(aten.sparse_coo_tensor, aten._coalesced_, aten._sparse_coo_tensor_unsafe, aten.is_coalesced, aten._nnz)
@sparse_kernel(aten.sparse_dim, aten.dense_dim, aten._dimI, aten._dimV)
def pass_through(launch: KernelContext) -> Any:
    """Run the operator itself: it wraps existing indices and values, and allocates nothing."""
    return launch.func(*launch.args, **launch.kwargs)


@sparse_kernel(aten._coalesce)
def coalesce(launch: KernelContext) -> Any:
    """Sort the indices and sum the values of equal indices. All indices are assumed to differ.

    _coalesce_sparse_cuda allocates flat indices, their origins and first occurrences, then new values and indices.
    """
    sparse = launch.args[0]
    indices, values = get_sparse_parts(sparse)
    num_indices = indices.shape[1]
    num_unique = min(num_indices, math.prod(sparse.shape[: len(indices)]))
    launch.values.assume("Indices of sparse tensors are taken to differ: what is coalesced stays as large.")
    with launch.scratch(*3 * [8 * num_indices]):
        launch.transients(radix_sort_bytes(num_indices, 8, 8, 64, launch.gpu))
        summed_values = launch.new((num_unique, *values.shape[1:]), values.dtype)
    return _replace_parts(
        sparse, [launch.new((len(indices), num_unique), indices.dtype), summed_values], coalesced=True
    )


@sparse_kernel(aten._to_sparse)
def to_sparse(launch: KernelContext) -> Any:
    """Allocate the indices of nonzero elements, and their values (native/TensorConversions.cpp, dense_to_sparse)."""
    dense, layout = launch.args[0], launch.kwargs.get("layout") or torch.sparse_coo
    if layout is torch.sparse_csr:
        return to_sparse_csr(launch)
    if layout is not torch.sparse_coo or len(launch.args) > 1:
        return NotImplemented
    with launch.inside():
        indices = aten.nonzero.default(dense).t()
    values = launch.new(indices.shape[1:], dense.dtype)
    return _make_sparse(torch.sparse_coo, dense.dim(), [indices, values], dense.size(), True)


@sparse_kernel(aten._to_sparse_csr)
def to_sparse_csr(launch: KernelContext) -> Any:
    """Allocate row offsets, columns and values, from a coalesced tensor or from the nonzero elements of a dense tensor
    (native/TensorConversions.cpp, coo_to_sparse_csr, dense_to_sparse_compressed)."""
    source = launch.args[0]
    if source.dim() != 2 or source.layout not in (torch.strided, torch.sparse_coo):
        return NotImplemented
    with launch.inside():
        if source.layout is torch.sparse_coo:
            indices, values = get_sparse_parts(source.coalesce())
            rows, columns = indices
        else:
            mask = aten.ne.Scalar(source, 0)
            rows, columns = aten.nonzero.default(mask).unbind(1)
            values = source.flatten().index_select(0, mask.flatten().nonzero().view(-1))
        row_offsets = aten._convert_indices_from_coo_to_csr.default(rows, len(source))
    return _make_sparse(torch.sparse_csr, 0, [row_offsets, columns, values], source.size(), True)


@sparse_kernel(aten._sparse_sum)
def sparse_sum(launch: KernelContext) -> Any:
    """Sum over dimensions: copy and coalesce the values and the remaining dimensions' indices
    (SparseTensorMath.cpp)."""
    sparse, dims = launch.args[0], {dim % launch.args[0].dim() for dim in launch.args[1]}
    indices, values = get_sparse_parts(sparse)
    kept_dims = [dim for dim in range(len(indices)) if dim not in dims]
    value_dims = [dim - len(indices) + 1 for dim in dims if dim >= len(indices)]
    with launch.inside():
        summed_values = values.sum(value_dims) if value_dims else values.clone()
        if not kept_dims:
            return summed_values.sum(0)
        kept_indices = indices.clone() if len(kept_dims) == len(indices) else indices[kept_dims]
        size = [size for dim, size in enumerate(sparse.shape) if dim not in dims]
        return _make_sparse(torch.sparse_coo, len(kept_dims), [kept_indices, summed_values], size, False).coalesce()


@sparse_kernel(aten.sparse_compressed_tensor)
def compressed_tensor(launch: KernelContext) -> Any:
    """Wrap indices and values. Without `size`, the size follows from the compressed indices and the largest plain index
    (native/sparse/SparseCsrTensor.cpp, _estimate_sparse_compressed_tensor_size)."""
    indices, plain_indices, values, *size = launch.args
    if not size:
        with launch.inside():
            largest_index = launch.values.policy.read(aten.max.default(plain_indices)).item()
        layout, dims = launch.kwargs["layout"], indices.dim()
        block_shape = values.shape[dims : dims + 2] if layout in (torch.sparse_bsr, torch.sparse_bsc) else (1, 1)
        plane_shape = indices.shape[-1] - 1, int(largest_index) + 1
        rows, columns = plane_shape if layout in (torch.sparse_csr, torch.sparse_bsr) else plane_shape[::-1]
        dense_shape = values.shape[dims + 2 * (block_shape != (1, 1)) :]
        size = [(*indices.shape[:-1], rows * block_shape[0], columns * block_shape[1], *dense_shape)]
    return aten._sparse_compressed_tensor_unsafe.default(indices, plain_indices, values, *size, **launch.kwargs)


@kernel(aten._embedding_bag_backward, on_host=True)
def embedding_bag_backward(launch: KernelContext) -> Any:
    """Return the gradient of an embedding bag's table; with sparse=True, with a row per index (EmbeddingBag.cpp)."""
    grad, indices, offsets, offset2bag, bag_size, _, num_weights, by_freq, mode, is_sparse, *rest = launch.args
    if launch.call.device is None:
        return NotImplemented
    if not is_sparse:
        return make_embedding_bag_gradient(launch)
    rest = [*rest, launch.kwargs.get("padding_idx", -1)] if len(rest) < 2 else rest
    arguments = (grad, indices, offsets, offset2bag, bag_size, num_weights, by_freq, mode, *rest)
    with launch.inside():
        return aten._embedding_bag_sparse_backward.default(*arguments)


@sparse_kernel(aten.sparse_mask)
def sparse_mask(launch: KernelContext) -> Any:
    """Return a sparse tensor with the dense tensor's values at the mask's indices.

    A CSR mask is made dense, in bool, and then there are the positions of all elements, in int64
    (native/sparse/SparseCsrTensorMath.cpp, sparse_mask_sparse_compressed; native/TensorConversions.cpp,
    _mask_to_indices).
    """
    dense, mask = launch.args[:2]
    *indices, values = get_sparse_parts(mask)
    is_made_dense = mask.layout is torch.sparse_csr and dense.layout is torch.strided
    with launch.scratch(mask.numel() * is_made_dense):
        with launch.inside():
            copies = [aten.clone.default(index) for index in indices]
        launch.transients(8 * mask.numel() * is_made_dense)
        return _replace_parts(mask, [*copies, launch.new(values.shape, dense.dtype)])


@sparse_kernel(aten.sparse_sampled_addmm)
def sampled_addmm(launch: KernelContext) -> Any:
    """Return a matrix with the places of the first one, which is CSR, and values of the product of two dense ones.

    It is a copy of the first one, to which the product is added (native/sparse/SparseBlas.cpp). The buffer of cuSPARSE
    is not counted, and batches of matrices are not simulated.
    """
    if launch.args[1].dim() != 2:
        return NotImplemented
    *indices, values = get_sparse_parts(launch.args[0])
    with launch.inside():
        copies = [aten.clone.default(index) for index in indices]
    return _replace_parts(launch.args[0], [*copies, launch.new(values.shape, values.dtype)])


@sparse_kernel(aten.add, aten.sub, aten.add_, aten.sub_)
def add(launch: KernelContext) -> Any:
    """Add a sparse tensor to a dense one, with a temporary index per row if rows may be equal
    (add_out_dense_sparse_cuda), or add two sparse tensors by concatenating their indices and values."""
    first, second = launch.args[:2]
    if not isinstance(second, torch.Tensor) or second.layout is torch.strided:
        return NotImplemented
    if first.layout is torch.strided:
        indices, values = get_sparse_parts(second)
        with launch.inside():
            result = first if launch.operator.name.endswith("_") else aten.clone.default(first)
        if not second.is_coalesced():
            is_scaled = launch.argument(2, "alpha", 1) != 1
            launch.transients(8 * indices.shape[1], values.numel() * values.element_size() * is_scaled)
        launch.values.store.drop(result.untyped_storage()._cdata)
        return result
    part_pairs = zip(get_sparse_parts(first), get_sparse_parts(second), (1, 0), strict=True)
    with launch.inside():
        total = _replace_parts(first, [aten.cat.default([a, b], dim) for a, b, dim in part_pairs])
        if total._nnz() > total.numel():  # so that sums of sums do not grow without bound (add_out_sparse_cuda)
            total = total.coalesce()
    if launch.operator.name.endswith("_"):
        first.data = total
        return first
    return total


@sparse_kernel(aten.mul, aten.div, aten.neg, aten.mul_, aten.div_)
def map_values(launch: KernelContext) -> Any:
    """Apply the operator, whose other operand may be a number, to the values of a sparse tensor."""
    sparse, *rest = launch.args
    if rest and isinstance(rest[0], torch.Tensor) and rest[0].dim():
        return NotImplemented
    *indices, values = get_sparse_parts(sparse)
    with launch.inside():
        result = launch.func(values, *rest, **launch.kwargs)
        if result is values:
            return sparse
        return _replace_parts(sparse, [*(aten.clone.default(index) for index in indices), result])


@sparse_kernel(aten.t, aten.transpose)
def transpose(launch: KernelContext) -> Any:
    """Copy indices and values, and one dimension's indices to swap dimensions (TensorShape.cpp, sparse_transpose_)."""
    sparse = launch.args[0]
    if sparse.layout is not torch.sparse_coo or sparse.sparse_dim() != 2 or sparse.dim() != 2:
        return NotImplemented
    with launch.inside():
        parts = [aten.clone.default(part) for part in reversed(get_sparse_parts(sparse))][::-1]
    launch.transients(8 * sparse._nnz())
    return _replace_parts(sparse, parts, sparse.shape[::-1])


@sparse_kernel(aten.mm, aten.mv, aten.addmm, aten._sparse_addmm)
def multiply(launch: KernelContext) -> Any:
    """Multiply a sparse matrix by a dense one (SparseCUDATensorMath.cu, s_addmm_out_sparse_dense_cuda).

    Temporaries are zeros of the result's size, except in addmm, and cuSPARSE's buffer. A COO matrix is coalesced, its
    indices are converted to 32 bits, and cuSPARSE writes a column-major copy of the result. A dense matrix that is
    neither row-major nor column-major is copied.
    """
    has_addend = launch.operator.packet not in (aten.mm, aten.mv)
    sparse, dense = launch.args[1:3] if has_addend else launch.args[:2]
    layouts = (torch.sparse_coo, torch.sparse_csr)
    if sparse.layout not in layouts or dense.layout is not torch.strided:
        return run_with_dense_operands(launch)
    matrix = dense if dense.dim() == 2 else dense.unsqueeze(-1)
    shape = (sparse.shape[0], *dense.shape[1:])
    if matrix.dim() != 2 or sparse.dim() != 2 or sparse.shape[1] != dense.shape[0]:
        return run_with_dense_operands(launch)  # the error is torch's own
    is_csr = sparse.layout is torch.sparse_csr
    result_bytes = math.prod(shape) * dense.element_size()
    is_vector = launch.operator.packet is aten.mv
    with launch.scratch(result_bytes * (not has_addend and not (is_csr and is_vector))):
        result = launch.new(shape, dense.dtype)
        is_dense_layout = matrix.is_contiguous() or matrix.mT.is_contiguous()
        copied_bytes = dense.numel() * dense.element_size() * (not is_dense_layout)
        if is_csr:
            launch.transients(copied_bytes, *_cusparse_buffer(launch, sparse._nnz(), matrix.shape[1] == 1, is_csr))
            return result
        with launch.inside():
            coalesced = sparse.coalesce()
        num_indices = coalesced._nnz()
        with launch.scratch(4 * (len(sparse) + 1)):
            launch.transients(4 * num_indices)
            with launch.scratch(4 * num_indices):
                launch.transients(
                    result_bytes, copied_bytes, *_cusparse_buffer(launch, num_indices, matrix.shape[1] == 1, is_csr)
                )
    return result


def _cusparse_buffer(launch: KernelContext, num_indices: int, is_vector: bool, is_csr: bool) -> list[int]:
    """Return the bytes of cuSPARSE's buffer for a product; [] except on compute capability 9.0. The formula fits all
    248 buffers recorded on an H100, from 600 to 2,500,000 elements and for 1 to 256 columns, with CUDA 13.0."""
    if launch.gpu.compute_capability != (9, 0):
        return []
    if is_vector:
        return [8 * (-(-num_indices // 3072) + 1) + 7 if is_csr else 4 * (-(-num_indices // 4096) + 1) + 3]
    return [8 * -(-num_indices // 24) + 7 if is_csr else 4 * (-(-num_indices // 256) + 1) + 3]


@sparse_kernel(aten.bmm, aten._to_dense, aten.sum)
def run_with_dense_operands(launch: KernelContext) -> Any:
    """Run an operator with a dense result, with empty dense tensors in place of sparse operands."""

    def make_dense(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return torch.empty(value.shape, dtype=value.dtype, device=META)
        return value

    args = [make_dense(arg) for arg in launch.args]
    if launch.func.overloadpacket is aten._to_dense:
        return launch.new(args[0].shape, launch.argument(1, "dtype") or args[0].dtype)
    is_addmm = launch.func.overloadpacket is aten._sparse_addmm
    result = (aten.addmm.default if is_addmm else launch.func)(*args, **launch.kwargs)
    launch.record(result)
    return result
