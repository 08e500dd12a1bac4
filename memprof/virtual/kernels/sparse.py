"""Sparse tensors: their indices and values, which are what takes memory, each a tensor on the card.

Those of the host are torch's own affair. On the card a sparse tensor is torch's for the meta device around recorded
indices and values; how many elements are not zero is taken from known values, else all of them are, which bounds the
memory from above. Sources: native/sparse/SparseTensor.cpp, native/sparse/cuda/SparseCUDATensor.cu and
SparseCUDATensorMath.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.kernels.registry import Table, kernel
from memprof.virtual.kernels.sorting import radix_sort_scratch
from memprof.virtual.launch import Launch
from memprof.watch.wrappers import parts_of_sparse

_aten = torch.ops.aten
_META = torch.device("meta")

of_sparse = Table("kernel for sparse tensors")
"""Function of (launch), called where an operand is sparse and virtual, or a sparse result is to be made of one."""


def _with_parts(sparse: torch.Tensor, parts: list[torch.Tensor], size: Any = None, coalesced: bool = False) -> Any:
    """A sparse tensor like `sparse` around other indices and values."""
    return assembled(
        sparse.layout, sparse.sparse_dim() if len(parts) == 2 else 0, parts, size or sparse.size(), coalesced
    )


def assembled(layout: torch.layout, sparse_dims: int, parts: list[torch.Tensor], size: Any, coalesced: bool) -> Any:
    """A virtual sparse tensor of these indices and values."""
    values = parts[-1]
    options: dict[str, Any] = {"dtype": values.dtype, "layout": layout, "device": _META}
    if len(parts) == 3:
        return _aten._sparse_compressed_tensor_unsafe.default(*parts, size, **options)
    dense_dims = len(size) - sparse_dims
    return _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        sparse_dims, dense_dims, size, *parts, **options, is_coalesced=coalesced
    )


@of_sparse(_aten._to_copy, _aten.clone)
def copied(launch: Launch) -> Any:
    """A copy of the indices and of the values; of these alone the dtype changes."""
    sparse, kwargs = launch.args[0], {k: v for k, v in launch.kwargs.items() if k in ("device", "dtype")}
    *indices, values = parts_of_sparse(sparse)
    of_indices = {k: v for k, v in kwargs.items() if k == "device"}
    with launch.inside():
        parts = [launch.func(index, **of_indices) for index in indices] + [launch.func(values, **kwargs)]
    if not values.is_meta and parts[-1].is_meta:
        return _with_parts(sparse, parts, coalesced=sparse.layout is torch.sparse_coo and sparse.is_coalesced())
    if values.is_meta and not parts[-1].is_meta:  # read by the host
        if len(parts) == 3:
            return _aten._sparse_compressed_tensor_unsafe.default(*parts, sparse.size(), layout=sparse.layout)
        return torch.sparse_coo_tensor(parts[0], parts[1], sparse.size(), check_invariants=False)
    return _with_parts(sparse, parts)


@of_sparse(_aten._sparse_coo_tensor_with_dims_and_tensors, _aten._sparse_compressed_tensor_unsafe, _aten.detach)
@of_sparse(_aten._coalesced_, _aten._sparse_coo_tensor_unsafe, _aten.is_coalesced, _aten._nnz)
@of_sparse(_aten.sparse_dim, _aten.dense_dim, _aten._dimI, _aten._dimV)
def around(launch: Launch) -> Any:
    """Nothing is made but the tensor around indices and values."""
    return launch.func(*launch.args, **launch.kwargs)


@of_sparse(_aten._coalesce)
def coalesce(launch: Launch) -> Any:
    """Sorted and added up: as many rows as there are different indices, which is taken to be all.

    _coalesce_sparse_cuda takes flat indices, where each was, which are the first of their kind; new values, indices.
    """
    sparse = launch.args[0]
    indices, values = parts_of_sparse(sparse)
    count = indices.shape[1]
    launch.values.assume("Indices of sparse tensors are taken to differ: what is coalesced stays as large.")
    with launch.scratch(*3 * [8 * count]):
        launch.transients(radix_sort_scratch(count, 8, 8, 64, launch.card))
        added = launch.new(values.shape, values.dtype)
    return _with_parts(sparse, [launch.new(indices.shape, indices.dtype), added], coalesced=True)


@of_sparse(_aten._to_sparse)
def to_sparse(launch: Launch) -> Any:
    """The places of what is not zero, and those elements (native/TensorConversions.cpp, dense_to_sparse)."""
    dense = launch.args[0]
    with launch.inside():
        places = _aten.nonzero.default(dense).t()
    return assembled(
        torch.sparse_coo, dense.dim(), [places, launch.new(places.shape[1:], dense.dtype)], dense.size(), True
    )


@kernel(_aten._embedding_bag_backward)
def embedding_bag_backward(launch: Launch) -> Any:
    """The gradient for sparse=True: a row for each index (native/EmbeddingBag.cpp, _embedding_bag_sparse_backward)."""
    grad, indices, offsets, bags, sizes, _, weights, by_frequency, mode, is_sparse, *rest = launch.args
    if not is_sparse:
        return NotImplemented
    rest = [*rest, launch.kwargs.get("padding_idx", -1)] if len(rest) < 2 else rest
    with launch.inside():
        return _aten._embedding_bag_sparse_backward.default(
            grad, indices, offsets, bags, sizes, weights, by_frequency, mode, *rest
        )


@of_sparse(_aten.sparse_mask)
def sparse_mask(launch: Launch) -> Any:
    """The dense tensor's values at the mask's indices."""
    dense, mask = launch.args[:2]
    *indices, values = parts_of_sparse(mask)
    with launch.inside():
        copies = [_aten.clone.default(index) for index in indices]
    return _with_parts(mask, [*copies, launch.new(values.shape, dense.dtype)])


@of_sparse(_aten.add, _aten.sub, _aten.add_, _aten.sub_)
def add(launch: Launch) -> Any:
    """Sparse to dense: one index for each row if rows may be equal (add_out_dense_sparse_cuda). Sparse to sparse: the
    indices and values of both, one after the other."""
    first, second = launch.args[:2]
    if not isinstance(second, torch.Tensor) or second.layout is torch.strided:
        return NotImplemented
    if first.layout is torch.strided:
        indices, values = parts_of_sparse(second)
        with launch.inside():
            result = first if launch.operator.name.endswith("_") else _aten.clone.default(first)
        if not second.is_coalesced():
            scaled = launch.argument(2, "alpha", 1) != 1
            launch.transients(8 * indices.shape[1], values.numel() * values.element_size() * scaled)
        launch.values.drop(result.untyped_storage()._cdata)
        return result
    if launch.operator.name.endswith("_"):
        return NotImplemented
    both = zip(parts_of_sparse(first), parts_of_sparse(second), (1, 0), strict=True)
    with launch.inside():
        return _with_parts(first, [_aten.cat.default([one, other], dim) for one, other, dim in both])


@of_sparse(_aten.mul, _aten.div, _aten.neg, _aten.mul_, _aten.div_)
def of_values(launch: Launch) -> Any:
    """The same of the values, by a number."""
    sparse, *rest = launch.args
    if rest and isinstance(rest[0], torch.Tensor) and rest[0].dim():
        return NotImplemented
    *indices, values = parts_of_sparse(sparse)
    with launch.inside():
        result = launch.func(values, *rest, **launch.kwargs)
        if result is values:
            return sparse
        return _with_parts(sparse, [*(_aten.clone.default(index) for index in indices), result])


@of_sparse(_aten.t, _aten.transpose)
def transpose(launch: Launch) -> Any:
    """Indices and values are copied."""
    sparse = launch.args[0]
    if sparse.layout is not torch.sparse_coo or sparse.sparse_dim() != 2 or sparse.dim() != 2:
        return NotImplemented
    with launch.inside():
        return _with_parts(sparse, [_aten.clone.default(part) for part in parts_of_sparse(sparse)], sparse.shape[::-1])


@of_sparse(*(_aten.mm, _aten.addmm, _aten.bmm, _aten.mv, _aten._sparse_addmm, _aten._to_dense, _aten.sum))
def dense_result(launch: Launch) -> Any:
    """What is dense whatever its operands are: as if all were."""

    def filled(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return torch.empty(value.shape, dtype=value.dtype, device=_META)
        return value

    args = [filled(arg) for arg in launch.args]
    if launch.func.overloadpacket is _aten._to_dense:
        return launch.new(args[0].shape, launch.argument(1, "dtype") or args[0].dtype)
    func: Callable[..., Any] = launch.func
    if launch.func.overloadpacket is _aten._sparse_addmm:
        func = _aten.addmm.default
    result = func(*args, **launch.kwargs)
    launch.record(result)
    return result
