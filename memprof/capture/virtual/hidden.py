"""What CUDA kernels take from the allocator and no tensor shows: one formula per operator, each with its source.

A *workspace* is taken once and kept (cuBLAS); a *temporary* lives while its operator runs. Formulas give bytes.
Sources name the file of PyTorch in which the allocation is made.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memprof.capture.virtual import copies

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


def flash_attention_backward(args: Any, num_sms: int) -> list[int]:
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


def efficient_attention_backward(args: Any, num_sms: int) -> list[int]:
    """The float32 row sums delta of the memory-efficient attention backward (attention_backward.cu)."""
    query = args[1]
    batch, heads, length, _ = query.shape
    return [4 * batch * heads * length]


def embedding_backward(args: Any, num_sms: int) -> list[int]:
    """Sorted and original indices and their range, for more than 3,072 indices (Embedding.cu)."""
    indices = args[1]
    count = indices.numel()
    return 3 * [count * indices.element_size()] if count > 3072 else []


def cumsum_copy(args: Any, num_sms: int = 0) -> list[int]:
    """Integers and booleans are summed as int64, from a copy, after the output (ReduceOps.cpp, impl_func_cum_ops)."""
    data = args[0]
    return [8 * data.numel()] if not data.is_floating_point() and data.dtype is not torch.int64 else []


def embedding_copy(args: Any) -> list[int]:
    """Indices that cannot be viewed flat are copied (native/Embedding.cpp, embedding)."""
    indices = args[1]
    return [] if indices.is_contiguous() else [indices.numel() * indices.element_size()]


def embedding_backward_copy(args: Any) -> list[int]:
    """The indices and the gradient are made contiguous (native/cuda/Embedding.cu)."""
    return copies.contiguous(args[1], args[0])


INPUT_COPIES: dict[Any, Callable[[Any], list[int]]] = {
    _aten.embedding: embedding_copy,
    _aten.embedding_dense_backward: embedding_backward_copy,
    _aten.convolution: copies.convolution_copy,
    _aten.native_layer_norm: copies.layer_norm_copy,
    _aten.native_layer_norm_backward: copies.layer_norm_backward_copy,
    _aten.roll: copies.roll_copies,
    _aten._foreach_norm: copies.foreach_norm_partials,
}
"""What an operator takes before its outputs and drops when it returns: copies of its inputs, mostly."""


def safe_softmax(args: Any, num_sms: int) -> list[int]:
    """The boolean mask of -inf scores and of rows without any (native/transformers/attention.cpp, _safe_softmax)."""
    scores = args[0]
    return [scores.numel(), scores.numel() // scores.shape[-1]]


def index_put_accumulate(args: Any, num_sms: int) -> list[int]:
    """Adding at indices sorts them (native/cuda/Indexing.cu, index_put_with_sort_kernel).

    Taken: the linear index (wrapped, times its stride, summed over dimensions), sorted and original positions, a range,
    and cub's scratch. The sequence is that of real recordings with one index tensor.
    """
    indices = [index for index in args[1] if index is not None]
    if not (len(args) > 3 and args[3]) or not indices:
        return []
    num_bytes = 8 * torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    return [num_bytes] * (3 * len(indices) - 1) + [num_bytes] * 3 + [1]


_SPLIT_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_INT32_MAX = 2**31 - 1


def max_threads_per_sm(compute_capability: tuple[int, int]) -> int:
    """Threads that a multiprocessor can hold (CUDA C++ programming guide, table of technical specifications)."""
    major, minor = compute_capability
    if (major, minor) == (7, 5):
        return 1024
    return 1536 if major in (11, 12) or (major == 8 and minor) else 2048


@dataclass(frozen=True)
class Reduction:
    """A reduction as its kernel sees it: dimensions by rising stride, the reduced ones first, neighbours merged."""

    reduced: tuple[tuple[int, int], ...]
    """(size, stride in elements) of the reduced dimensions."""
    kept: tuple[tuple[int, int], ...]
    item_bytes: int
    accumulator_bytes: int
    values_per_load: int = 4
    """What a thread loads at once along a contiguous reduced dimension (the kernel's vt0)."""

    @classmethod
    def of(cls, tensor: torch.Tensor, dims: Any, accumulator_bytes: int, values_per_load: int = 4) -> Reduction:
        """Reducing `tensor` over `dims` (None and empty: all).

        The order is that of TensorIterator.cpp, reorder_dimensions: kept dimensions as in the result, which is
        contiguous; reduced ones by the stride of the input.
        """
        rank = tensor.dim()
        wanted = _as_list(dims)
        chosen = {dim % rank for dim in wanted} if wanted and rank else set(range(rank))
        order = [dim for dim in reversed(range(rank)) if tensor.size(dim) != 1]
        reduced = [(tensor.size(dim), tensor.stride(dim)) for dim in order if dim in chosen]
        kept = [(tensor.size(dim), tensor.stride(dim)) for dim in order if dim not in chosen]
        return cls(
            _merged(_by_stride(reduced)), _merged(kept), tensor.element_size(), accumulator_bytes, values_per_load
        )

    def split(self) -> list[Reduction]:
        """The parts that 32-bit indices can address, each of which is a launch of its own (halves of the widest)."""
        dims = self.reduced + self.kept
        extents = [(size - 1) * stride * self.item_bytes for size, stride in dims]
        if not extents or (sum(extents) < _INT32_MAX and math.prod(size for size, _ in dims) <= _INT32_MAX):
            return [self]
        widest = extents.index(max(extents))
        size, stride = dims[widest]
        parts: list[Reduction] = []
        for part in (size // 2, size - size // 2):
            halved = (*dims[:widest], (part, stride), *dims[widest + 1 :])
            count = len(self.reduced)
            parts += replace(self, reduced=halved[:count], kept=halved[count:]).split()
        return parts

    def buffers(self, num_sms: int, threads_per_sm: int) -> list[int]:
        """The staging buffer and the semaphores of a reduction that is split over thread blocks; else nothing.

        The launch rule of native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size): a block is at
        most 512 threads, one warp wide where it can be; the inputs of one output go over blocks once every thread of a
        block would have 256 or more of them.
        """
        outputs = math.prod(size for size, _ in self.kept)
        inputs = math.prod(size for size, _ in self.reduced)
        if not outputs or not inputs:
            return []
        along_inputs = not self.kept or (bool(self.reduced) and self.reduced[0][1] < self.kept[0][1])
        width, height = (inputs, outputs) if along_inputs else (outputs, inputs)
        fastest = self.reduced[:1] if along_inputs else self.kept[:1]
        vector = 1
        if fastest and fastest[0][1] == 1:
            if along_inputs and width >= 128 and len(self.reduced) == 1:
                width //= self.values_per_load
            elif not along_inputs:
                vector = self._output_vector()
                width //= vector
        limit = _SPLIT_THREADS // vector
        widest, highest = min(_power_of_two(width), limit), min(_power_of_two(height), limit)
        rows = min(highest, limit // min(widest, 32))
        columns = min(widest, limit // rows)
        step_input, step_output = (columns, 1) if along_inputs else (1, columns)
        if -(-inputs // step_input) < min(rows * 16, _MAX_VALUES_PER_THREAD):
            return []
        values = -(-inputs // (step_input * rows))
        grid = -(-(outputs // vector) // step_output)
        target = num_sms * (threads_per_sm // (columns * rows))
        if values < _MAX_VALUES_PER_THREAD or grid > target:
            return []
        blocks = max(
            min(-(-target // grid), -(-values // _MIN_VALUES_PER_THREAD)), -(-values // _MAX_VALUES_PER_THREAD)
        )
        if blocks <= 1:
            return []
        staged = self.accumulator_bytes * outputs * blocks
        return [staged if along_inputs else staged * columns * vector, 4 * grid]

    def _output_vector(self) -> int:
        """How many neighbouring outputs a thread makes (get_output_vec_size): 4, 2 or 1, dividing every stride."""
        numbers = [self.kept[0][0], *(stride for _, stride in self.reduced), *(stride for _, stride in self.kept[1:])]
        return next(vector for vector in (4, 2, 1) if all(number % vector == 0 for number in numbers))


def _as_list(dims: Any) -> list[int]:
    if dims is None or isinstance(dims, bool):
        return []
    return [dims] if isinstance(dims, int) else list(dims)


def _by_stride(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted by insertion, as TensorIterator does: an expanded dimension (stride 0) moves for none and is passed by."""
    ordered = list(pairs)
    for last in range(1, len(ordered)):
        moving = last
        for other in range(last - 1, -1, -1):
            before, after = ordered[other], ordered[moving]
            if not before[1] or not after[1] or before == after:
                continue
            if (before[1], before[0]) < (after[1], after[0]):
                break
            ordered[other], ordered[moving] = after, before
            moving = other
    return ordered


def _merged(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring dimensions that are one walk through memory, made one."""
    merged: list[tuple[int, int]] = []
    for size, stride in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def _power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def _opmath(tensor: torch.Tensor) -> int:
    """Bytes of the type in which values of `tensor` are added up: float32 for half precision, int64 for integers."""
    if tensor.is_floating_point() or tensor.is_complex():
        return max(4, tensor.element_size())
    return 8


def _reduction(
    accumulator: Callable[[torch.Tensor], int],
    dims_at: int = 1,
    values_per_load: int = 4,
    *,
    half_per_load: int = 4,
    cast: bool = False,
) -> Callable[[Any, int], list[int]]:
    """The formula of an operator that calls gpu_reduce_kernel, whose dimensions are its argument number `dims_at`."""

    def formula(args: Any, num_sms: int) -> list[int]:
        data = args[0]
        dims = args[dims_at] if len(args) > dims_at else None
        copied: list[int] = []
        if cast and not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.int64:
            # native/ReduceOpsUtils.h, make_reduction: what is not of the result's type is converted first.
            copied = [8 * data.numel()]
            data = torch.empty_strided(data.size(), data.stride(), dtype=torch.int64, device="meta")
        per_load = half_per_load if values_per_load == 4 and data.element_size() == 2 else values_per_load
        num_bytes = data.element_size() if accumulator is _pair and dims is None else accumulator(data)
        return copied + reduction_buffers(data, dims, num_bytes, num_sms, per_load)

    return formula


def reduction_buffers(
    tensor: torch.Tensor, dims: Any, accumulator_bytes: int, num_sms: int, values_per_load: int = 4
) -> list[int]:
    """Buffers of every launch of a reduction; where half precision takes several, first the sums between them."""
    if tensor.numel() < 2:
        return []
    whole = Reduction.of(tensor, dims, accumulator_bytes, values_per_load)
    threads = torch.cuda.get_device_properties(0).max_threads_per_multi_processor
    parts = whole.split()
    sums = []
    if len(parts) > 1 and tensor.dtype in (torch.float16, torch.bfloat16):
        sums = [accumulator_bytes * math.prod(size for size, _ in whole.kept)]
    return sums + [size for part in parts for size in _buffers(part, num_sms, threads)]


@functools.lru_cache(maxsize=4096)
def _buffers(part: Reduction, num_sms: int, threads_per_sm: int) -> tuple[int, ...]:
    return tuple(part.buffers(num_sms, threads_per_sm))


def _own(tensor: torch.Tensor) -> int:
    return tensor.element_size()


def _pair(tensor: torch.Tensor) -> int:
    """A value and its int64 index, aligned to 8 bytes; max() and min() without a dimension keep no index."""
    return 16


def _index(tensor: torch.Tensor) -> int:
    """A value and its int64 index; unlike max and min, argmax and argmin keep it without a dimension as well."""
    return 16


def _welford(tensor: torch.Tensor) -> int:
    """Mean, sum of squares, an int32 count and the count as a real number (native/SharedReduceOps.h, WelfordData)."""
    return 32 if tensor.dtype is torch.float64 else 16


_HALVES_PER_LOAD = 8 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10) else 4
"""Sum and mean of half precision load eight values at once since torch 2.10 (pull request 165055)."""

REDUCTIONS: dict[Any, Callable[[Any, int], list[int]]] = {
    _aten.sum: _reduction(_opmath, half_per_load=_HALVES_PER_LOAD, cast=True),
    _aten.prod: _reduction(_opmath, cast=True),
    _aten.nansum: _reduction(_opmath),
    _aten.mean: _reduction(_opmath, half_per_load=_HALVES_PER_LOAD),
    _aten.linalg_vector_norm: _reduction(_opmath, dims_at=2),
    _aten.amax: _reduction(_own),
    _aten.amin: _reduction(_own),
    _aten.max: _reduction(_pair),
    _aten.min: _reduction(_pair),
    _aten.argmax: _reduction(_index),
    _aten.argmin: _reduction(_index),
    _aten.any: _reduction(_own),
    _aten.all: _reduction(_own),
    _aten.var: _reduction(_welford, values_per_load=2),
    _aten.std: _reduction(_welford, values_per_load=2),
    _aten.var_mean: _reduction(_welford, values_per_load=2),
    _aten.std_mean: _reduction(_welford, values_per_load=2),
}
"""Operators on gpu_reduce_kernel (native/cuda/Reduce*Kernel.cu), by the type that they accumulate in."""


TEMPORARIES: dict[Any, Callable[[Any, int], list[int]]] = {
    **REDUCTIONS,
    _aten.cumsum: cumsum_copy,
    _aten.native_layer_norm_backward: copies.layer_norm_backward_gradient,
    _aten.upsample_nearest2d_backward: copies.upsample_backward_gradient,
    _aten.index_put: index_put_accumulate,
    _aten.index_put_: index_put_accumulate,
    _aten._index_put_impl_: index_put_accumulate,
    _aten._scaled_dot_product_flash_attention_backward: flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: efficient_attention_backward,
    _aten.embedding_dense_backward: embedding_backward,
    **({_aten._safe_softmax: safe_softmax} if hasattr(_aten, "_safe_softmax") else {}),
}
