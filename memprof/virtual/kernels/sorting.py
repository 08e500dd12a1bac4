"""Operators that sort, select, count and scan: CUB's scratch memory, and the inner operators of their CUDA kernels.

CUB computes sizes from launch policies that differ by GPU (cub/device/dispatch/tuning). The formulas for sorts and
tiles reproduce CUB of CUDA 13.0 on compute capabilities 8.0, 8.6 and 9.0, and, except for sorts, on 7.5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.allocator.releases import Change, find_libraries
from memprof.torch_private import kernels
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes, make_copies_formula
from memprof.virtual.kernels.reductions import reduction_buffers
from memprof.virtual.kernels.registry import META, aten, composite, input_copies, kernel, scratch

_ALIGNMENT = 256
_NUM_DIGITS = 256
_DIGIT_BITS = 8
_SINGLE_TILE_ITEMS = 256 * 9
_ONESWEEP_THREADS = 384
_MAX_PORTION_ITEMS = (1 << 28) - 1
# torch counts elements in 64 bits (aten/src/ATen/cuda/cub.h, radix_sort_pairs); CUB's offsets have the same type.
_OFFSET_BYTES = 8
# Items of a tile: on GPUs other than the following, on compute capability 8.0, from 9.0 on.
_TILE_ITEMS = {
    "sum of int32": (128 * 15, 320 * 12, 128 * 24),
    "sum of int64": (128 * 7, 288 * 11, 224 * 12),
    "flagged": (128 * 5, 256 * 9, 384 * 11),
    "unique of int32": (128 * 10, 256 * 18, 384 * 17),
    "unique of int64": (128 * 5, 192 * 10, 384 * 11),
    "unique by key": (64 * 5, 256 * 7, 448 * 10),
    "sum by key": (256 * 9, 256 * 15, 224 * 18),
}
_RUN_LENGTH_TILE_ITEMS = 128 * 6
_REDUCE_THREADS = 256
_SUBSCRIPTION_FACTOR = 5  # cub's subscription factor
_MAX_SMALL_SORT = 4096
_INT_MAX = 2**31 - 1


def _sum_aligned(buffer_sizes: list[int]) -> int:
    """Return the bytes of one allocation for buffers of `buffer_sizes` bytes, each aligned (CUB's
    alias_temporaries)."""
    total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in buffer_sizes)
    return total + _ALIGNMENT - 1 if total else 1


def radix_sort_bytes(num_keys: int, key_bytes: int, value_bytes: int, key_bits: int, gpu: DeviceProperties) -> int:
    """Return the bytes of DeviceRadixSort's scratch for `num_keys` keys with `key_bits` significant bits; 1 if all keys
    fit one tile (cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep)."""
    if num_keys <= _SINGLE_TILE_ITEMS:
        return 1
    # At most 120 bytes per thread, so that the shared memory (48 KiB) holds the items of all threads.
    items_per_thread = _onesweep_items(key_bytes, value_bytes, gpu) * 4 // max(4, key_bytes, value_bytes)
    tile_items = _ONESWEEP_THREADS * items_per_thread
    num_passes = -(-key_bits // _DIGIT_BITS)
    items_per_portion = _MAX_PORTION_ITEMS // tile_items * tile_items
    num_portions = -(-num_keys // items_per_portion)
    num_blocks = -(-min(num_keys, items_per_portion) // tile_items)
    second_buffers = [num_keys * key_bytes, num_keys * value_bytes] if num_passes > 1 else []
    bin_bytes = num_portions * num_passes * _NUM_DIGITS * _OFFSET_BYTES, num_blocks * _NUM_DIGITS * 4
    return _sum_aligned([*bin_bytes, *second_buffers, num_portions * num_passes * 4])


def _onesweep_items(key_bytes: int, value_bytes: int, gpu: DeviceProperties) -> int:
    """Return the number of 4-byte items per thread; keys under 4 bytes use the number for compute capability 8.0."""
    if gpu.compute_capability < (9, 0) or key_bytes < 4:
        return 17 if key_bytes == 4 else 21
    if key_bytes == 4:
        return 17 if value_bytes < 8 else 29
    return 30 if value_bytes < 8 else 24


def _count_tile_items(algorithm: str, gpu: DeviceProperties) -> int:
    return _TILE_ITEMS[algorithm][(gpu.compute_capability == (8, 0)) + 2 * (gpu.compute_capability >= (9, 0))]


def scan_bytes(num_items: int, item_bytes: int, gpu: DeviceProperties, algorithm: str = "") -> int:
    """Return the bytes of the scratch of DeviceScan and DeviceSelect: a status word for every tile.

    `algorithm` is a key of _TILE_ITEMS if the algorithm has a tuned tile; torch's operators use the generic tile ("").
    """
    tile_items = _count_tile_items(algorithm, gpu) if algorithm else 128 * max(1, min(15 * 4 // item_bytes, 30))
    status_bytes = (-(-num_items // tile_items) + 32) * (8 if item_bytes <= 4 else 16)
    # CUB 3.0 also aligns the status words separately (cub/agent/single_pass_scan_operators.cuh).
    return _sum_aligned([_sum_aligned([status_bytes]) if find_libraries(gpu.release).cuda >= "13" else status_bytes])


def reduce_bytes(num_items: int, gpu: DeviceProperties) -> int:
    """Return the bytes of DeviceReduce's scratch for a 32-bit sum: a sum for each possible thread block; 1 if all items
    fit one tile (cub/device/dispatch/dispatch_reduce.cuh, InvokePasses)."""
    num_blocks = gpu.num_sms * (gpu.threads_per_sm // _REDUCE_THREADS) * _SUBSCRIPTION_FACTOR
    return 1 if num_items <= _REDUCE_THREADS * 16 else _sum_aligned([4 * num_blocks])


def run_length_bytes(num_items: int) -> int:
    """Return the bytes of DeviceRunLengthEncode's scratch: a status word with a key for every tile."""
    return _sum_aligned([(-(-num_items // _RUN_LENGTH_TILE_ITEMS) + 32) * 16])


def count_key_bits(max_key: int) -> int:
    """Return the number of significant bits of keys up to `max_key` (aten/src/ATen/cuda/cub.h, get_num_bits)."""
    return max(1, max_key.bit_length())


def _read_dim(args: Any, position: int, rank: int, default: int = -1) -> int:
    value = args[position] if len(args) > position and isinstance(args[position], int) else default
    return value % rank if rank else 0


def _sort_buffers(data: torch.Tensor, dim: int, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a sort along `dim`: of a single row, in segments, or in place up to 4,096 values."""
    length = data.shape[dim] if data.dim() else 1
    num_elements, item_bytes = data.numel(), data.element_size()
    if not num_elements:
        return []
    if length <= _MAX_SMALL_SORT:
        return [8 * length]
    buffers: list[int] = []
    if not (data.stride(dim) == 1 and aten.is_non_overlapping_and_dense(data)):
        buffers.append(num_elements * item_bytes)
        if dim != data.dim() - 1:  # both results are first made with the sorted dimension last
            buffers += [num_elements * item_bytes, 8 * num_elements]
    num_segments = min(num_elements, _INT_MAX) // length
    batch_items = num_segments * length
    if num_segments == 1 or length >= 1_000_000:
        return [*buffers, 8 * length, radix_sort_bytes(length, item_bytes, 8, 8 * item_bytes, gpu)]
    if num_segments < 128:
        # (segment, position) pairs twice, the sorted keys, and the larger scratch of two consecutive sorts.
        sort_bytes = radix_sort_bytes(batch_items, item_bytes, 8, 8 * item_bytes, gpu)
        return [*buffers, 8 * batch_items, 8 * batch_items, batch_items * item_bytes, sort_bytes]
    return [*buffers, 8 * batch_items, _sum_aligned([batch_items * item_bytes, batch_items * 8])]


@scratch(aten.sort)
def compute_sort_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of `sort` and `argsort`. A dimension passed by keyword (stable sorts) is taken as the last."""
    return _sort_buffers(args[0], _read_dim(args, 1, args[0].dim()), gpu)


_TOPK_BLOCK_THREADS = 256
_TOPK_BLOCKS_PER_SM = 65_536 // (40 * _TOPK_BLOCK_THREADS)  # registers of a multiprocessor, and of each thread
_MULTIBLOCK_LIMITS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))


@scratch(aten.topk)
def compute_topk_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of `topk` (TensorTopK.cu): several thread blocks for long slices, a sort for k > 4,096."""
    data, k = args[0], args[1]
    dim = _read_dim(args, 2, data.dim())
    length = data.shape[dim] if data.dim() else 1
    if not length or not k:
        return []
    num_slices = data.numel() // length
    min_length = next((length for max_slices, length in _MULTIBLOCK_LIMITS if num_slices <= max_slices), 400)
    copies = copy_bytes(data)
    needs_sort = k > _MAX_SMALL_SORT and (len(args) < 5 or args[4])
    sort_buffers = [16 * num_slices * k, num_slices * k * data.element_size(), 8 * k] if needs_sort else []
    if length < min_length:
        return copies + sort_buffers
    items_per_thread = -(-(length * num_slices) // (gpu.num_sms * _TOPK_BLOCKS_PER_SM * _TOPK_BLOCK_THREADS))
    items_per_block = max(4, min(items_per_thread, 64)) * _TOPK_BLOCK_THREADS
    num_blocks = num_slices * -(-length // items_per_block)
    radix_bytes = max(4, data.element_size())
    kth_bytes, slice_buffers = num_slices * data.element_size(), [8 * num_slices, 2 * num_slices * radix_bytes]
    has_digit_sums = Change.TOPK_DIGIT_SUMS.is_in(gpu.release)
    first_buffers = [kth_bytes] if has_digit_sums else [kth_bytes, 4 * num_slices]
    sum_buffers = [num_slices * _NUM_DIGITS * 4] if has_digit_sums else []
    scan_buffers = [_sum_by_key_bytes(num_blocks, gpu)] * 2
    return [
        *copies,
        *first_buffers,
        *slice_buffers,
        num_blocks * _NUM_DIGITS * 2,
        *sum_buffers,
        4 * num_blocks,
        4 * num_blocks,
        *scan_buffers,
        *sort_buffers,
    ]


def _sum_by_key_bytes(num_items: int, gpu: DeviceProperties) -> int:
    """Return the bytes of DeviceScan's scratch for 32-bit sums by key: a status word and two keys per tile."""
    num_tiles = -(-num_items // _count_tile_items("sum by key", gpu))
    return _sum_aligned([(num_tiles + 32) * 16, 4 * (num_tiles + 1)])


# native/cuda/ScanUtils.cuh, scan_dim_with_indices; native/cuda/Bucketization.cu: numbers and boundaries
scratch(aten.cummax, aten.cummin)(make_copies_formula(0))
scratch(aten.searchsorted, aten.bucketize)(make_copies_formula(0, 1))


@scratch(aten.mode)
def compute_mode_copies(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a contiguous copy of the input with `dim` last (native/cuda/TensorModeKernel.cpp)."""
    data = args[0]
    return copy_bytes(data.transpose(_read_dim(args, 1, data.dim()), -1)) if data.dim() else []


@scratch(aten.cumsum, aten.cumprod, aten.logcumsumexp, aten._logcumsumexp)
def compute_scan_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a scan: CUB's scratch if there is one dimension, else none (native/cuda/ScanUtils.cuh).

    Integers and booleans are cast to int64, and inputs are made contiguous (native/ReduceOps.cpp, impl_func_cum_ops).
    """
    data = args[0]
    if not data.numel():
        return []
    copies = []
    if not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.int64:
        copies.append(8 * data.numel())
        data = torch.empty_like(data, dtype=torch.int64, device="meta")
    copies += copy_bytes(data)
    dim = _read_dim(args, 1, data.dim())
    is_one_dim = data.dim() > 0 and data.numel() == data.shape[dim]
    return copies + ([scan_bytes(data.numel(), data.element_size(), gpu)] if is_one_dim else [])


@scratch(aten.multinomial)
def compute_multinomial_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of cumulative and normalized probabilities, for replacement=True (MultinomialKernel.cu)."""
    weights, num_samples = args[0], args[1]
    return [weights.nbytes] * 2 if len(args) > 2 and args[2] and num_samples > 1 else []


@kernel(aten.multinomial)
def multinomial(launch: KernelContext) -> Any:
    """Check the probabilities, divide by exponential variates and select the largest (native/Distributions.cpp)."""
    weights, num_samples = launch.args[:2]
    result = launch.run()
    if not weights.numel() or (launch.argument(2, "replacement", False) and num_samples > 1):
        return result
    with launch.inside():
        is_valid = aten.bitwise_and.Tensor(weights.max().lt(math.inf), weights.min().ge(0))
        is_zero = weights.sum().eq(0) if weights.dim() == 1 else weights.sum(1).eq(0).any()
        del is_valid
        is_zero.bitwise_not()
    with launch.scratch(weights.nbytes):
        if num_samples == 1:
            launch.transients(*reduction_buffers(weights, -1, 16, launch.gpu))
        else:
            values_bytes = math.prod(result.shape) * weights.element_size()
            launch.transients(values_bytes, *compute_topk_scratch((weights, num_samples), launch.gpu))
    return result


@scratch(aten.randperm)
def compute_randperm_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a count check, the range, two arrays of random keys, and the sort (cuda/Randperm.cu)."""
    count = args[0]
    if not isinstance(count, int) or count <= 0:
        return []
    key_bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / (math.log(0.9) * 12))))
    key_bytes = 4 if key_bits <= 32 else 8
    return [8, 8 * count, key_bytes * count, key_bytes * count, radix_sort_bytes(count, key_bytes, 8, key_bits, gpu)]


@kernel(aten.median, aten.nanmedian)
def median(launch: KernelContext) -> Any:
    """Return the median of all elements from a sorted copy (native/cuda/Sorting.cpp, median_impl)."""
    if launch.func not in (aten.median.default, aten.nanmedian.default) or not launch.args[0].numel():
        return NotImplemented
    data = launch.args[0]
    with launch.inside():
        sorted_values = aten.sort.default(data.reshape(-1))[0]
        if launch.operator.packet is aten.median:
            middle = sorted_values[(data.numel() - 1) // 2]
            return torch.where(sorted_values[-1].isnan(), sorted_values[-1], middle)
        position = aten.rsub.Scalar(sorted_values.isnan().sum(), data.numel() - 1).div(2).to(torch.int64)
        return aten.index.Tensor(sorted_values, [position])


@kernel(aten.isin)
def isin(launch: KernelContext) -> Any:
    """Compare each element with each test element if those are few; otherwise torch sorts (TensorCompare.cpp)."""
    if launch.func is not aten.isin.Tensor_Tensor or launch.call.real:
        return NotImplemented
    elements, test_elements = launch.args[:2]
    invert = launch.kwargs.get("invert", False)
    if not elements.numel() or test_elements.numel() >= 10 * elements.numel() ** 0.145:
        return NotImplemented
    with launch.inside():
        result = torch.empty(elements.shape, dtype=torch.bool, device=META)
        row = test_elements.view([1] * elements.dim() + [-1])
        column = elements.unsqueeze(-1)
        is_found = column.ne(row).all(-1) if invert else column.eq(row).any(-1)
        return result.copy_(is_found)


@kernel(aten.count_nonzero)
def count_nonzero(launch: KernelContext) -> Any:
    """Return the sum of a mask of nonzero elements (native/TensorAdvancedIndexing.cpp, count_nonzero_cuda)."""
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
def compute_histc_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the minimum and the maximum, if no bounds are passed (native/cuda/SummaryOps.cu)."""
    data, (low, high) = args[0], (*args[2:4], 0, 0)[:2]
    buffers = [data.element_size(), *reduction_buffers(data, None, data.element_size(), gpu)]
    return buffers * 2 if low == high and data.numel() else []


@scratch(aten.unfold_backward)
def compute_unfold_backward_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of positions along the unfolded dimension, if windows overlap (native/UnfoldBackward.h)."""
    sizes, dim, size, step = args[1:5]
    return [8 * sizes[dim]] if step < size and sizes else []


@composite(kernels.one_hot)
def one_hot(device_state: DeviceState, input: torch.Tensor, num_classes: int = -1) -> Any:
    """Scatter ones into zeros, as on CUDA; for meta tensors, torch compares with a range (native/Onehot.cpp)."""
    if not device_state.is_on_gpu(input) or not input.numel() or input.dtype is not torch.int64:
        return NotImplemented
    if num_classes == -1:
        num_classes = int(input.max().item()) + 1
    result = torch.zeros((*input.shape, num_classes), dtype=torch.int64, device=input.device)
    return result.scatter_(-1, input.unsqueeze(-1), 1)
