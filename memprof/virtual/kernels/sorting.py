"""Scratch memory of operators that sort, select and scan: CUB's, and the buffers that torch puts around it.

CUB computes its sizes from launch policies that differ by card: the tiles here are those of compute capabilities 8.0
and 9.0 (cub/device/dispatch/tuning/tuning_radix_sort.cuh, Policy800 and Policy900, and dispatch_scan.cuh). They move
the bookkeeping (a few per cent of a sort's scratch), not the second copies of keys and values, which are exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import scratch

_aten = torch.ops.aten

_ALIGNMENT = 256
_DIGITS = 256
_DIGIT_BITS = 8
_SINGLE_TILE_ITEMS = 256 * 9
_ONESWEEP_THREADS = 384
_MAX_PORTION = (1 << 28) - 1
_OFFSET_BYTES = 8
"""torch counts elements in 64 bits (aten/src/ATen/cuda/cub.h, radix_sort_pairs), and CUB its offsets as it is asked."""
_SCAN_TILE = 128 * 15
_SMALL_SORT = 4096
_INT_MAX = 2**31 - 1


def _together(sizes: list[int]) -> int:
    """Several buffers in one allocation (cub's alias_temporaries)."""
    total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return total + _ALIGNMENT - 1 if total else 1


def radix_sort_scratch(count: int, key_bytes: int, value_bytes: int, bits: int, card: Card) -> int:
    """Bytes that DeviceRadixSort takes for `count` keys of `bits` significant bits; nothing of note up to one tile
    (cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep)."""
    if count <= _SINGLE_TILE_ITEMS:
        return 1
    widest = max(key_bytes, value_bytes)
    items = max(1, _onesweep_items(key_bytes, value_bytes, card) * 4 // max(4, widest))
    threads = min(_ONESWEEP_THREADS, -(-(48 * 1024 // (widest * items)) // 32) * 32)
    tile = threads * items
    passes = -(-bits // _DIGIT_BITS)
    portion = _MAX_PORTION // tile * tile
    portions = -(-count // portion)
    blocks = -(-min(count, portion) // tile)
    twice = passes > 1
    return _together(
        [
            portions * passes * _DIGITS * _OFFSET_BYTES,
            blocks * _DIGITS * 4,
            count * key_bytes if twice else 0,
            count * value_bytes if twice else 0,
            portions * passes * 4,
        ]
    )


def _onesweep_items(key_bytes: int, value_bytes: int, card: Card) -> int:
    """Items of four bytes for each thread. Smaller keys are tuned one by one: what 8.0 has stands for them."""
    if card.compute_capability < (9, 0) or key_bytes < 4:
        return 17 if key_bytes == 4 else 21
    if key_bytes == 4:
        return 17 if value_bytes < 8 else 29
    return 30 if value_bytes < 8 else 24


def scan_scratch(count: int, item_bytes: int) -> int:
    """Bytes that DeviceScan and DeviceSelect take: a status word for every tile."""
    word = 8 if item_bytes <= 4 else 16
    return _together([(-(-count // _SCAN_TILE) + 32) * word])


def num_bits(largest: int) -> int:
    """Significant bits of keys up to `largest` (aten/src/ATen/cuda/cub.h, get_num_bits)."""
    return max(1, largest.bit_length())


def _dim(args: Any, position: int, rank: int, default: int = -1) -> int:
    value = args[position] if len(args) > position and isinstance(args[position], int) else default
    return value % rank if rank else 0


def _sort_buffers(data: torch.Tensor, dim: int, card: Card) -> list[int]:
    """native/cuda/Sort.cpp and SortStable.cu: of the whole, in segments, or in place for up to 4,096 values."""
    length = data.shape[dim] if data.dim() else 1
    count, item = data.numel(), data.element_size()
    if not count:
        return []
    if length <= _SMALL_SORT:
        return [8 * length]
    buffers: list[int] = []
    dense_last = data.stride(dim) == 1 and _is_dense(data)
    if not dense_last:
        buffers.append(count * item)
        if dim != data.dim() - 1:  # neither result has the sorted dimension last: both are made so first
            buffers += [count * item, 8 * count]
    segments = min(count, _INT_MAX) // length
    at_once = segments * length
    if segments == 1 or length >= 1_000_000:
        return [*buffers, 8 * length, radix_sort_scratch(length, item, 8, 8 * item, card)]
    if segments < 128:
        # (segment, position) pairs twice, the sorted keys, and the larger of two sorts' scratch, one after the other.
        sort = radix_sort_scratch(at_once, item, 8, 8 * item, card)
        return [*buffers, 8 * at_once, 8 * at_once, at_once * item, sort]
    return [*buffers, 8 * at_once, _together([at_once * item, at_once * 8])]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@scratch(_aten.sort)
def sort(args: Any, card: Card) -> list[int]:
    """`sort` and `argsort`; a dimension given by keyword (stable sorts) is taken to be the last."""
    return _sort_buffers(args[0], _dim(args, 1, args[0].dim()), card)


_TOPK_BLOCK_THREADS = 256
_TOPK_REGISTERS = 40 * _TOPK_BLOCK_THREADS
_REGISTERS_PER_SM = 65_536
_MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))


@scratch(_aten.topk)
def topk(args: Any, card: Card) -> list[int]:
    """native/cuda/TensorTopK.cu: long slices are searched by several blocks; a sort of the k follows for k > 4,096."""
    data, k = args[0], args[1]
    dim = _dim(args, 2, data.dim())
    length = data.shape[dim] if data.dim() else 1
    if not length or not k:
        return []
    slices = data.numel() // length
    least = next((length for most, length in _MULTIBLOCK if slices <= most), 400)
    copied = contiguous(data)
    sorts = len(args) < 5 or args[4]
    tail = [16 * slices * k, slices * k * data.element_size(), 8 * k] if sorts and k > _SMALL_SORT else []
    if length < least:
        return copied + tail
    per_sm = min(_REGISTERS_PER_SM // _TOPK_REGISTERS, 32)
    items = -(-(length * slices) // (card.num_sms * per_sm * _TOPK_BLOCK_THREADS))
    per_block = max(4, min(items, 64)) * _TOPK_BLOCK_THREADS
    blocks = slices * -(-length // per_block)
    radix = max(4, data.element_size())
    return [
        *copied,
        slices * data.element_size(),
        4 * slices,
        8 * slices,
        2 * slices * radix,
        blocks * _DIGITS * 2,
        4 * blocks,
        4 * blocks,
        scan_scratch(blocks, 4),
        *tail,
    ]


@scratch(_aten.cummax, _aten.cummin)
def scan_with_indices(args: Any, card: Card) -> list[int]:
    """A contiguous copy of the input (native/cuda/ScanUtils.cuh, scan_dim_with_indices)."""
    return contiguous(args[0])


@scratch(_aten.mode)
def mode(args: Any, card: Card) -> list[int]:
    """The input with the dimension looked along last, contiguous (native/cuda/TensorModeKernel.cpp)."""
    data = args[0]
    return contiguous(data.transpose(_dim(args, 1, data.dim()), -1)) if data.dim() else []


@scratch(_aten.searchsorted, _aten.bucketize)
def searchsorted(args: Any, card: Card) -> list[int]:
    """Contiguous copies of numbers and boundaries, where they are none (native/cuda/Bucketization.cu)."""
    return contiguous(*(arg for arg in args[:2] if isinstance(arg, torch.Tensor)))


@scratch(_aten.cumsum, _aten.cumprod, _aten.logcumsumexp, _aten._logcumsumexp)
def scan(args: Any, card: Card) -> list[int]:
    """native/cuda/ScanUtils.cuh: along the only dimension by CUB, else by torch's kernels, on contiguous inputs.

    Integers and booleans are cast to int64 first (native/ReduceOps.cpp, impl_func_cum_ops).
    """
    data = args[0]
    if not data.numel():
        return []
    copied = []
    if not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.int64:
        copied.append(8 * data.numel())
        data = torch.empty_like(data, dtype=torch.int64, device="meta")
    copied += contiguous(data)
    dim = _dim(args, 1, data.dim())
    alone = data.dim() > 0 and data.numel() == data.shape[dim]
    return copied + ([scan_scratch(data.numel(), data.element_size())] if alone else [])


def nonzero(data: torch.Tensor) -> list[int]:
    """A contiguous copy, the number found, and CUB's scratch to count and then to select (native/cuda/Nonzero.cu)."""
    return [*contiguous(data), 4, scan_scratch(data.numel(), 4)] if data.numel() else []


@scratch(_aten.multinomial)
def multinomial(args: Any, card: Card) -> list[int]:
    """Exponential variates like the probabilities; for many draws with replacement sums of them (Distributions.cpp)."""
    weights, draws = args[0], args[1]
    replacement = len(args) > 2 and args[2]
    if replacement and draws > 1:
        # Cumulative, normalised probabilities (native/cuda/MultinomialKernel.cu).
        return 2 * [weights.numel() * weights.element_size()]
    return [weights.numel() * weights.element_size()]


@scratch(_aten.randperm)
def randperm(args: Any, card: Card) -> list[int]:
    """The range, random keys twice, and a sort by them (native/cuda/Randperm.cu)."""
    count = args[0]
    if not isinstance(count, int) or count <= 0:
        return []
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / (math.log(0.9) * 12))))
    key = 4 if bits <= 32 else 8
    return [8 * count, key * count, key * count, radix_sort_scratch(count, key, 8, bits, card)]
