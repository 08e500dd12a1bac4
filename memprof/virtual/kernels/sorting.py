"""Operators that sort, select, count and scan: CUB's scratch memory, and the inner operators of their CUDA kernels.

CUB computes sizes from launch policies that differ by GPU (cub/device/dispatch/tuning). The formulas for sorts and
tiles reproduce CUB of CUDA 13.0 on compute capabilities 8.0, 8.6 and 9.0, and, except for sorts, on 7.5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.device_properties import DeviceProperties, cuda_version
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import contiguous, make_copies_formula
from memprof.virtual.kernels.reductions import reduction_buffers
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, scratch

_ALIGNMENT = 256
_DIGITS = 256
_DIGIT_BITS = 8
_SINGLE_TILE_ITEMS = 256 * 9
_ONESWEEP_THREADS = 384
_MAX_PORTION = (1 << 28) - 1
# torch counts elements in 64 bits (aten/src/ATen/cuda/cub.h, radix_sort_pairs); CUB's offsets have the same type.
_OFFSET_BYTES = 8
# Items of a tile: on GPUs other than the following, on compute capability 8.0, from 9.0 on.
_TILES = {
    "sum of int32": (128 * 15, 320 * 12, 128 * 24),
    "sum of int64": (128 * 7, 288 * 11, 224 * 12),
    "flagged": (128 * 5, 256 * 9, 384 * 11),
    "unique of int32": (128 * 10, 256 * 18, 384 * 17),
    "unique of int64": (128 * 5, 192 * 10, 384 * 11),
    "unique by key": (64 * 5, 256 * 7, 448 * 10),
    "sum by key": (256 * 9, 256 * 15, 224 * 18),
}
_RUN_LENGTH_TILE = 128 * 6
_REDUCE_THREADS = 256
_BLOCKS_PER_RESIDENT = 5  # cub's subscription factor
_SMALL_SORT = 4096
_INT_MAX = 2**31 - 1


def _sum_aligned(sizes: list[int]) -> int:
    """Return the bytes of one allocation for buffers of `sizes`, each aligned (cub's alias_temporaries)."""
    total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return total + _ALIGNMENT - 1 if total else 1


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int, gpu: DeviceProperties) -> int:
    """Return the bytes of DeviceRadixSort's scratch for `count` keys of `bits` significant bits; 1 up to one tile
    (cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep)."""
    if count <= _SINGLE_TILE_ITEMS:
        return 1
    widest = max(key_bytes, value_bytes)
    items = max(1, _onesweep_items(key_bytes, value_bytes, gpu) * 4 // max(4, widest))
    threads = min(_ONESWEEP_THREADS, -(-(48 * 1024 // (widest * items)) // 32) * 32)
    tile = threads * items
    num_passes = -(-bits // _DIGIT_BITS)
    items_per_portion = _MAX_PORTION // tile * tile
    num_portions = -(-count // items_per_portion)
    num_blocks = -(-min(count, items_per_portion) // tile)
    second_buffers = [count * key_bytes, count * value_bytes] if num_passes > 1 else []
    bins = num_portions * num_passes * _DIGITS * _OFFSET_BYTES, num_blocks * _DIGITS * 4
    return _sum_aligned([*bins, *second_buffers, num_portions * num_passes * 4])


def _onesweep_items(key_bytes: int, value_bytes: int, gpu: DeviceProperties) -> int:
    """Return the number of 4-byte items per thread; keys under 4 bytes use the number for compute capability 8.0."""
    if gpu.compute_capability < (9, 0) or key_bytes < 4:
        return 17 if key_bytes == 4 else 21
    if key_bytes == 4:
        return 17 if value_bytes < 8 else 29
    return 30 if value_bytes < 8 else 24


def _count_tile_items(algorithm: str, gpu: DeviceProperties) -> int:
    return _TILES[algorithm][(gpu.compute_capability == (8, 0)) + 2 * (gpu.compute_capability >= (9, 0))]


def scan_bytes(count: int, item_bytes: int, gpu: DeviceProperties, algorithm: str = "") -> int:
    """Return the bytes of the scratch of DeviceScan and DeviceSelect: a status word for every tile.

    `algorithm` is a key of _TILES, for the algorithms with a tuned tile; torch's operators use the generic tile ("").
    """
    tile = _count_tile_items(algorithm, gpu) if algorithm else 128 * max(1, min(15 * 4 // item_bytes, 30))
    size = (-(-count // tile) + 32) * (8 if item_bytes <= 4 else 16)
    # CUB 3.0 also aligns the status words separately (cub/agent/single_pass_scan_operators.cuh).
    return _sum_aligned([_sum_aligned([size]) if cuda_version(gpu.release) >= "13" else size])


def reduce_bytes(count: int, gpu: DeviceProperties) -> int:
    """Return the bytes of DeviceReduce's scratch for a 32-bit sum: one sum for each possible block, 1 up to one tile
    (cub/device/dispatch/dispatch_reduce.cuh, InvokePasses)."""
    num_blocks = gpu.num_sms * (gpu.threads_per_sm // _REDUCE_THREADS) * _BLOCKS_PER_RESIDENT
    return 1 if count <= _REDUCE_THREADS * 16 else _sum_aligned([4 * num_blocks])


def run_length_bytes(count: int) -> int:
    """Return the bytes of DeviceRunLengthEncode's scratch: a status word with a key for every tile."""
    return _sum_aligned([(-(-count // _RUN_LENGTH_TILE) + 32) * 16])


def count_key_bits(largest: int) -> int:
    """Return the significant bits of keys up to `largest` (aten/src/ATen/cuda/cub.h, get_num_bits)."""
    return max(1, largest.bit_length())


def _read_dim(args: Any, position: int, rank: int, default: int = -1) -> int:
    value = args[position] if len(args) > position and isinstance(args[position], int) else default
    return value % rank if rank else 0


def _sort_buffers(data: torch.Tensor, dim: int, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a sort: of one row, in segments, or in place up to 4,096 values (native/cuda/Sort.cpp)."""
    length = data.shape[dim] if data.dim() else 1
    count, item = data.numel(), data.element_size()
    if not count:
        return []
    if length <= _SMALL_SORT:
        return [8 * length]
    buffers: list[int] = []
    if not (data.stride(dim) == 1 and aten.is_non_overlapping_and_dense(data)):
        buffers.append(count * item)
        if dim != data.dim() - 1:  # both results are first made with the sorted dimension last
            buffers += [count * item, 8 * count]
    num_segments = min(count, _INT_MAX) // length
    batch_items = num_segments * length
    if num_segments == 1 or length >= 1_000_000:
        return [*buffers, 8 * length, radix_sort_bytes(length, item, 8, 8 * item, gpu)]
    if num_segments < 128:
        # (segment, position) pairs twice, the sorted keys, and the larger scratch of two consecutive sorts.
        sort = radix_sort_bytes(batch_items, item, 8, 8 * item, gpu)
        return [*buffers, 8 * batch_items, 8 * batch_items, batch_items * item, sort]
    return [*buffers, 8 * batch_items, _sum_aligned([batch_items * item, batch_items * 8])]


@scratch(aten.sort)
def sort(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of `sort` and `argsort`; a dimension passed by keyword (stable sorts) counts as the last."""
    return _sort_buffers(args[0], _read_dim(args, 1, args[0].dim()), gpu)


_TOPK_BLOCK_THREADS = 256
_TOPK_REGISTERS = 40 * _TOPK_BLOCK_THREADS
_REGISTERS_PER_SM = 65_536
_MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))


@scratch(aten.topk)
def topk(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of `topk` (native/cuda/TensorTopK.cu): several blocks for long slices, a sort for k > 4,096."""
    data, k = args[0], args[1]
    dim = _read_dim(args, 2, data.dim())
    length = data.shape[dim] if data.dim() else 1
    if not length or not k:
        return []
    num_slices = data.numel() // length
    min_length = next((length for max_slices, length in _MULTIBLOCK if num_slices <= max_slices), 400)
    copies = contiguous(data)
    sorts = len(args) < 5 or args[4]
    tail = [16 * num_slices * k, num_slices * k * data.element_size(), 8 * k] if sorts and k > _SMALL_SORT else []
    if length < min_length:
        return copies + tail
    per_sm = min(_REGISTERS_PER_SM // _TOPK_REGISTERS, 32)
    items = -(-(length * num_slices) // (gpu.num_sms * per_sm * _TOPK_BLOCK_THREADS))
    per_block = max(4, min(items, 64)) * _TOPK_BLOCK_THREADS
    num_blocks = num_slices * -(-length // per_block)
    radix = max(4, data.element_size())
    kth, slice_buffers = num_slices * data.element_size(), [8 * num_slices, 2 * num_slices * radix]
    # Since pull request 164459, the kernel has sums of digits instead of semaphores.
    has_digit_sums = gpu.release >= (2, 10)
    first, sums = ([kth], [num_slices * _DIGITS * 4]) if has_digit_sums else ([kth, 4 * num_slices], [])
    scans = [_sum_by_key_scratch(num_blocks, gpu)] * 2
    return [
        *copies,
        *first,
        *slice_buffers,
        num_blocks * _DIGITS * 2,
        *sums,
        4 * num_blocks,
        4 * num_blocks,
        *scans,
        *tail,
    ]


def _sum_by_key_scratch(count: int, gpu: DeviceProperties) -> int:
    """Return the bytes of DeviceScan's scratch for 32-bit sums by key: a status word and two keys per tile."""
    tiles = -(-count // _count_tile_items("sum by key", gpu))
    return _sum_aligned([(tiles + 32) * 16, 4 * (tiles + 1)])


# native/cuda/ScanUtils.cuh, scan_dim_with_indices; native/cuda/Bucketization.cu: numbers and boundaries
scratch(aten.cummax, aten.cummin)(make_copies_formula(0))
scratch(aten.searchsorted, aten.bucketize)(make_copies_formula(0, 1))


@scratch(aten.mode)
def mode(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a contiguous copy of the input with `dim` last (native/cuda/TensorModeKernel.cpp)."""
    data = args[0]
    return contiguous(data.transpose(_read_dim(args, 1, data.dim()), -1)) if data.dim() else []


@scratch(aten.cumsum, aten.cumprod, aten.logcumsumexp, aten._logcumsumexp)
def scan(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a scan: by CUB along the only dimension, else by torch's kernels (native/cuda/ScanUtils.cuh).

    Integers and booleans are cast to int64, and inputs made contiguous (native/ReduceOps.cpp, impl_func_cum_ops).
    """
    data = args[0]
    if not data.numel():
        return []
    copies = []
    if not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.int64:
        copies.append(8 * data.numel())
        data = torch.empty_like(data, dtype=torch.int64, device="meta")
    copies += contiguous(data)
    dim = _read_dim(args, 1, data.dim())
    is_one_dim = data.dim() > 0 and data.numel() == data.shape[dim]
    return copies + ([scan_bytes(data.numel(), data.element_size(), gpu)] if is_one_dim else [])


@scratch(aten.multinomial)
def multinomial_with_replacement(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of cumulative, normalised probabilities (native/cuda/MultinomialKernel.cu)."""
    weights, draws = args[0], args[1]
    return [weights.nbytes] * 2 if len(args) > 2 and args[2] and draws > 1 else []


@kernel(aten.multinomial)
def multinomial(launch: KernelContext) -> Any:
    """Check the probabilities, divide by exponential variates and take the largest (native/Distributions.cpp)."""
    weights, draws = launch.args[:2]
    result = launch.run()
    if not weights.numel() or (launch.argument(2, "replacement", False) and draws > 1):
        return result
    with launch.inside():
        valid = aten.bitwise_and.Tensor(weights.max().lt(math.inf), weights.min().ge(0))
        zero = weights.sum().eq(0) if weights.dim() == 1 else weights.sum(1).eq(0).any()
        del valid
        zero.bitwise_not()
    with launch.scratch(weights.nbytes):
        if draws == 1:
            launch.transients(*reduction_buffers(weights, -1, 16, launch.gpu))
        else:
            values = math.prod(result.shape) * weights.element_size()
            launch.transients(values, *topk((weights, draws), launch.gpu))
    return result


@scratch(aten.randperm)
def randperm(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the checked count, the range, random keys (twice) and the sort (cuda/Randperm.cu)."""
    count = args[0]
    if not isinstance(count, int) or count <= 0:
        return []
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / (math.log(0.9) * 12))))
    key = 4 if bits <= 32 else 8
    return [8, 8 * count, key * count, key * count, radix_sort_bytes(count, key, 8, bits, gpu)]


@kernel(aten.median, aten.nanmedian)
def median(launch: KernelContext) -> Any:
    """Make the median of all elements from a sorted copy (native/cuda/Sorting.cpp, median_impl)."""
    if launch.func not in (aten.median.default, aten.nanmedian.default) or not launch.args[0].numel():
        return NotImplemented
    data = launch.args[0]
    with launch.inside():
        ordered = aten.sort.default(data.reshape(-1))[0]
        if launch.operator.packet is aten.median:
            middle = ordered[(data.numel() - 1) // 2]
            return torch.where(ordered[-1].isnan(), ordered[-1], middle)
        position = aten.rsub.Scalar(ordered.isnan().sum(), data.numel() - 1).div(2).to(torch.int64)
        return aten.index.Tensor(ordered, [position])


@kernel(aten.isin)
def isin(launch: KernelContext) -> Any:
    """Compare each element with each of few test elements; many are sorted (native/TensorCompare.cpp, isin)."""
    if launch.func is not aten.isin.Tensor_Tensor or launch.call.real:
        return NotImplemented
    elements, tests = launch.args[:2]
    invert = launch.kwargs.get("invert", False)
    if not elements.numel() or tests.numel() >= 10 * elements.numel() ** 0.145:
        return NotImplemented
    with launch.inside():
        result = torch.empty(elements.shape, dtype=torch.bool, device=META)
        row = tests.view([1] * elements.dim() + [-1])
        column = elements.unsqueeze(-1)
        is_found = column.ne(row).all(-1) if invert else column.eq(row).any(-1)
        return result.copy_(is_found)


@kernel(aten.count_nonzero)
def count_nonzero(launch: KernelContext) -> Any:
    """Make the sum of a mask of the nonzero elements (native/TensorAdvancedIndexing.cpp, count_nonzero_cuda)."""
    if "out" in launch.kwargs:
        return NotImplemented
    dims = launch.argument(1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    with launch.inside():
        return aten.sum.dim_IntList(aten.ne.Scalar(launch.args[0], 0), dims)


@kernel(aten.roll)
def roll(launch: KernelContext) -> Any:
    """Roll several dimensions one after the other, each into a new tensor (native/TensorTransformations.h)."""
    data, shifts = launch.args[:2]
    dims = launch.argument(2, "dims", [])
    if len(dims) < 2 or "out" in launch.kwargs:
        return NotImplemented
    with launch.inside():
        for shift, dim in zip(shifts, dims, strict=True):
            data = aten.roll.default(data, [shift], [dim])
    return data


# A single dimension is rolled from contiguous memory (native/cuda/TensorTransformations.cu).
input_copies(aten.roll)(make_copies_formula(0))


@scratch(aten.histc)
def histc(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the minimum and the maximum, where no bounds are passed (native/cuda/SummaryOps.cu)."""
    data, (low, high) = args[0], (*args[2:4], 0, 0)[:2]
    buffers = [data.element_size(), *reduction_buffers(data, None, data.element_size(), gpu)]
    return buffers * 2 if low == high and data.numel() else []


@scratch(aten.unfold_backward)
def unfold_backward(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of positions along the unfolded dimension, where windows overlap (native/UnfoldBackward.h)."""
    sizes, dim, size, step = args[1:5]
    return [8 * sizes[dim]] if step < size and sizes else []


@composite(kernels.one_hot)
def one_hot(device_state: DeviceState, input: torch.Tensor, num_classes: int = -1) -> Any:
    """Scatter ones into zeros; for meta tensors, the C++ function compares with a range (native/Onehot.cpp)."""
    if not device_state.is_on_gpu(input) or not input.numel() or input.dtype is not torch.int64:
        return NotImplemented
    if num_classes == -1:
        num_classes = int(input.max().item()) + 1
    result = torch.zeros((*input.shape, num_classes), dtype=torch.int64, device=input.device)
    return result.scatter_(-1, input.unsqueeze(-1), 1)
