"""What CUDA kernels take from the allocator and no tensor shows: one formula per operator, each with its source.

A *workspace* is taken once and kept (cuBLAS); a *temporary* lives while its operator runs. Formulas give bytes.
Sources name the file of PyTorch in which the allocation is made.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels import copies, norms, selection, sorting
from memprof.virtual.kernels import missing_meta as layouts
from memprof.virtual.kernels.reductions import REDUCTIONS, opmath

_aten = torch.ops.aten

KIB = 1 << 10
MIB = 1 << 20


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class CublasWorkspace:
    """How torch's cuBLAS handles take their workspace (aten/src/ATen/cuda/CublasHandlePool.cpp).

    Until torch 2.14 a handle keeps its workspace for good, one per thread and stream: the autograd thread's first
    matrix product takes a second one. From 2.15 on it is taken and freed around every call.
    """

    num_bytes: int
    lt_num_bytes: int
    """The separate workspace of cuBLASLt (products with a bias); 0 where it shares the other one."""
    permanent: bool

    @classmethod
    def of(cls, compute_capability: tuple[int, int], torch_version: tuple[int, int]) -> CublasWorkspace:
        """The workspace of a card under a torch release; CUBLAS_WORKSPACE_CONFIG overrides the size."""
        big = compute_capability[0] == 9 or (compute_capability[0] in (10, 12) and torch_version >= (2, 12))
        num_bytes = 4096 * 8 * KIB if big else (4096 * 2 + 16 * 8) * KIB
        setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        pairs = re.findall(r":(\d+):(\d+)", setting)
        if pairs:
            num_bytes = sum(int(size) * int(count) for size, count in pairs) * KIB
        permanent = torch_version < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
        return cls(num_bytes, 0 if torch_version >= (2, 12) else MIB, permanent)


CUBLAS_OPS = frozenset(
    {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.vdot}
)
CUBLASLT_OPS = frozenset({_aten.addmm, _aten._addmm_activation})


def flash_attention_backward(args: Any, card: Card) -> list[int]:
    """Accumulators of the flash attention backward: dq in float32 and the row sums softmax_d (flash_api.cpp, mha_bwd).

    With grouped queries, dk and dv are first made for every query head and then summed.
    """
    query, key = args[1], args[2]
    batch, heads, length, head_dim = query.shape
    rounded_length = _round_up(length, 128)
    rounded_head = _round_up(head_dim, 32) if head_dim <= 128 else _round_up(head_dim, 64)
    sizes = [4 * batch * heads * rounded_length, 4 * batch * rounded_length * heads * rounded_head]
    if key.shape[1] != heads:
        sizes += 2 * [query.element_size() * batch * key.shape[2] * heads * head_dim]
    return sizes


def efficient_attention_backward(args: Any, card: Card) -> list[int]:
    """The float32 row sums delta of the memory-efficient attention backward (attention_backward.cu)."""
    query = args[1]
    batch, heads, length, _ = query.shape
    return [4 * batch * heads * length]


def embedding_copy(args: Any) -> list[int]:
    """Indices that cannot be viewed flat are copied (native/Embedding.cpp, embedding)."""
    return copies.contiguous(args[1])


_CHUNK = 65_536
"""Elements of a tensor that a block of a multi-tensor kernel takes (native/cuda/MultiTensorApply.cuh)."""
_GLOBAL_NORM = hasattr(_aten, "_foreach_global_norm")


def foreach_norm(args: Any) -> list[int]:
    """A float32 norm for each chunk of each tensor, as many as the largest tensor has (native/cuda/ForeachReduceOp.cu).

    It is made before the results and dropped with the call: gradient clipping takes it. Releases that have a global
    norm make a buffer of 320 and a scalar for that as well. Other orders than 1, 2 and infinity are taken one by one.
    """
    tensors = args[0]
    order = args[1] if len(args) > 1 else 2
    if not tensors or len({tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return []
    if order not in (1, 2, math.inf):
        return []
    item = opmath(tensors[0])
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [item * len(tensors) * chunks, *([item * 320, tensors[0].element_size()] if _GLOBAL_NORM else [])]


def _as_cublas_takes_it(tensor: torch.Tensor) -> bool:
    """Whether a matrix, or each of a batch, has rows or columns that are neighbours (native/cuda/Blas.cpp)."""
    *_, rows, columns = tensor.shape
    *_, row_step, step = tensor.stride()
    if (step == 1 and row_step >= columns) or (row_step == 1 and step >= rows):
        return True
    return (rows == 1 and step == 1) or (columns == 1 and row_step == 1) or (tensor.is_contiguous() and row_step > 0)


def _matrix_copies(first: int) -> Callable[[Any], list[int]]:
    """Copies of the two matrices from argument number `first` on, where cuBLAS cannot take them as they are."""

    def formula(args: Any) -> list[int]:
        return [
            matrix.numel() * matrix.element_size()
            for matrix in args[first : first + 2]
            if not _as_cublas_takes_it(matrix) and matrix.numel()
        ]

    return formula


INPUT_COPIES: dict[Any, Callable[[Any], list[int]]] = {
    _aten.embedding: embedding_copy,
    _aten._foreach_norm: foreach_norm,
    _aten.mm: _matrix_copies(0),
    _aten.bmm: _matrix_copies(0),
    _aten.addmm: _matrix_copies(1),
    _aten.baddbmm: _matrix_copies(1),
    **copies.INPUT_COPIES,
    **norms.INPUT_COPIES,
}
"""What an operator takes before its outputs and drops when it returns: copies of its inputs, mostly."""


def safe_softmax(args: Any, card: Card) -> list[int]:
    """The boolean mask of -inf scores and of rows without any (native/transformers/attention.cpp, _safe_softmax)."""
    scores, dim = args[0], args[1]
    return [scores.numel(), scores.numel() // max(1, scores.shape[dim] if scores.dim() else 1)]


def softmax(args: Any, card: Card) -> list[int]:
    """A contiguous copy of the input, where it is none (native/cuda/SoftMax.cu, host_softmax)."""
    return copies.contiguous(args[0])


def log_softmax_backward(args: Any, card: Card) -> list[int]:
    """Contiguous copies of gradient and output, such as of an expanded gradient (SoftMax.cu, host_softmax_backward)."""
    return copies.contiguous(args[0], args[1])


def softmax_backward(args: Any, card: Card) -> list[int]:
    """The product of gradient and output, as large as the output (native/cuda/SoftMax.cu, softmax_backward_cuda_out).

    It is laid out as its factors are; then it and the output are made contiguous.
    """
    product = args[0] * args[1]
    return [product.numel() * product.element_size(), *copies.contiguous(product, args[1])]


def index_put_accumulate(args: Any, card: Card) -> list[int]:
    """Adding at indices sorts them (native/cuda/Indexing.cu, index_put_with_sort_kernel).

    Taken: the linear index (wrapped, times its stride, summed over dimensions), sorted and original positions, a range,
    and cub's scratch. The sequence is that of real recordings with one index tensor.
    """
    data = args[0]
    indices = [index for index in args[1] if index is not None]
    if not (len(args) > 3 and args[3]) or not indices:
        return []
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    slice_size = math.prod(
        size for size, index in zip(data.shape, [*args[1], *[None] * data.dim()], strict=False) if index is None
    )
    bits = sorting.num_bits(max(1, data.numel() // max(1, slice_size)))
    scratch = sorting.radix_sort_scratch(count, 8, 8, bits)
    return [8 * count] * (3 * len(indices) - 1) + [8 * count] * 3 + [scratch]


TEMPORARIES: dict[Any, Callable[[Any, Card], list[int]]] = {
    **REDUCTIONS,
    **copies.TEMPORARIES,
    **sorting.TEMPORARIES,
    **norms.TEMPORARIES,
    **layouts.TEMPORARIES,
    **selection.TEMPORARIES,
    _aten.index_put: index_put_accumulate,
    _aten.index_put_: index_put_accumulate,
    _aten._index_put_impl_: index_put_accumulate,
    _aten._scaled_dot_product_flash_attention_backward: flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: efficient_attention_backward,
    _aten._softmax: softmax,
    _aten._log_softmax: softmax,
    _aten._softmax_backward_data: softmax_backward,
    _aten._log_softmax_backward_data: log_softmax_backward,
    **({_aten._safe_softmax: safe_softmax} if hasattr(_aten, "_safe_softmax") else {}),
}
