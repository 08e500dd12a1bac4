"""The sizes in the out-of-memory messages of torch's allocators and of libraries; those of engines are in engines/.

Formats: `malloc` of c10/cuda/CUDACachingAllocator.cpp (1.13 to 2.15; allocator/messages.py prints them),
c10/cuda/CUDAMallocAsyncAllocator.cpp and aten/src/ATen/mps/MPSAllocator.mm.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

from memprof.doctor.diagnosis import MessageSizes, PrintedSize
from memprof.units import GIB, KIB, MIB, TIB, format_bytes

# torch means powers of 1,024 by GB too, which its MPS allocator printed in earlier releases.
_UNITS = {"bytes": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT](?:i?B)?)\b"  # XLA prints 1.50G
_MAX_SIZE = 1 << 60  # NVML reports unknown sizes as the largest integer.


def read_size(number: str, unit: str, *, decimal: bool = False) -> PrintedSize:
    """Return the size printed as `number` and `unit`, with the range of bytes that are printed so.

    GB are 2^30 bytes, or 10^9 if `decimal`, and other units likewise.
    """
    factor = _UNITS.get(unit.lower()) or _UNITS[unit[0].lower()]
    if decimal:
        factor = 10 ** (3 * "bkmgt".index(unit[0].lower()))
    value = Decimal(number)
    unit = f"{unit}iB" if len(unit) == 1 else unit
    exponent = value.as_tuple().exponent
    half_digit = Decimal(5) * Decimal(10) ** ((exponent if isinstance(exponent, int) else 0) - 1)
    low, high = (value - half_digit) * factor, (value + half_digit) * factor
    return PrintedSize(f"{number} {unit}", int(value * factor), max(0, math.ceil(low)), math.floor(high))


def _find_size(pattern: str, message: str) -> PrintedSize | None:
    match = re.search(pattern.replace("AMOUNT", _AMOUNT), message)
    size = read_size(*match.groups()[-2:]) if match else None
    return None if size is None or size.num_bytes >= _MAX_SIZE else size


def read_message_sizes(message: str, tried: str, device: str = "", **size_patterns: str) -> MessageSizes:
    """Return the sizes in `message`: by field of MessageSizes, the regular expression that finds its size at AMOUNT."""
    sizes: dict[str, Any] = {name: _find_size(pattern, message) for name, pattern in size_patterns.items()}
    match = re.search(device, message) if device else None
    return MessageSizes(
        tried=_find_size(tried, message), tried_is_segment=False, device=int(match[1]) if match else None, **sizes
    )


def format_size(num_bytes: int) -> PrintedSize:
    """Return an exact size of `num_bytes`, which is not printed in the message."""
    return PrintedSize(format_bytes(num_bytes), num_bytes, num_bytes, num_bytes)


def add_sizes(first: PrintedSize, second: PrintedSize) -> PrintedSize:
    """Return the sum of two sizes, with the sum of their ranges."""
    total = first.num_bytes + second.num_bytes
    return PrintedSize(f"{total / GIB:.2f} GiB", total, first.low + second.low, first.high + second.high)


def subtract_sizes(first: PrintedSize, *others: PrintedSize) -> PrintedSize:
    """Return `first` without `others`, at least 0, with the range that their ranges give."""
    rest = max(0, first.num_bytes - sum(size.num_bytes for size in others))
    low = max(0, first.low - sum(size.high for size in others))
    return PrintedSize(format_bytes(rest), rest, low, max(0, first.high - sum(size.low for size in others)))


def read_caching_allocator(message: str) -> MessageSizes:
    """Return the sizes in a one-line `message` of torch's caching allocator (CUDA, ROCm or XPU)."""
    tried = _find_size("Tried to allocate AMOUNT", message)
    allocated = _find_size("AMOUNT already allocated", message) or _find_size(
        "Of the allocated memory AMOUNT is allocated", message
    )
    reserved = _find_size("AMOUNT reserved in total by PyTorch", message)
    # Before 1.4 the last figure was "cached": what the allocator held beyond the allocated.
    unallocated = _find_size("AMOUNT is reserved by PyTorch but unallocated", message) or _find_size(
        "AMOUNT cached", message
    )
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = add_sizes(allocated, unallocated)
    process = _find_size("this process has AMOUNT memory in use", message)
    if process is not None and allocated is not None and process.high < allocated.low:
        process = None  # NVML knows nothing of processes on this system (WSL, a container)
    processes = tuple(
        (int(pid), size)
        for pid, number, unit in re.findall(rf"Process (\d+) has {_AMOUNT} memory in use", message)
        if (size := read_size(number, unit)).num_bytes < _MAX_SIZE
    )
    is_mib = tried is not None and tried.text.endswith("MiB") and tried.num_bytes % MIB == 0
    is_segment = tried is not None and (tried.text.endswith("GiB") or (is_mib and tried.num_bytes // MIB % 2 == 0))
    match = re.search(r"GPU (\d+)[; ]", message) or re.search(r"XPU (\d+)[; ]", message)
    return MessageSizes(
        tried=tried,
        tried_is_segment=is_segment,
        device=int(match[1]) if match else None,
        total=_find_size("AMOUNT total capacity", message) or _find_size(r"total capac(?:i)?ty of AMOUNT", message),
        free=_find_size("of which AMOUNT is free", message) or _find_size("AMOUNT free[;)]", message),
        process=process,
        others=processes,
        allowed=_find_size("AMOUNT allowed;", message),
        allocated=allocated,
        reserved=reserved,
        private_pools=_find_size("with AMOUNT allocated in private pools", message),
    )


# Reads a message of the cudaMallocAsync backend.
read_malloc_async = partial(
    read_message_sizes,
    tried="Requested ?: ?AMOUNT",
    device=r"Allocation on device (\d+)",
    total="Device limit ?: ?AMOUNT",
    free=r"Free \(according to CUDA\) ?: ?AMOUNT",
    allowed=r"PyTorch limit \(set by user-supplied memory fraction\) ?: ?AMOUNT",
    allocated="Currently allocated ?: ?AMOUNT",
)


def read_mps(message: str) -> MessageSizes:
    """Return the sizes in a message of torch's MPS allocator; `total` is the maximum that it is allowed.

    The message's "other allocations" are this process's memory outside torch's pools, and count as its own.
    """
    sizes = read_message_sizes(
        message, "Tried to allocate AMOUNT", total="max allowed: AMOUNT", allocated="MPS allocated: AMOUNT"
    )
    others = _find_size("other allocations: AMOUNT", message)
    if others is None or sizes.allocated is None:
        return sizes
    return replace(sizes, process=add_sizes(sizes.allocated, others))


# Reads a message on a buffer larger than Metal supports.
read_metal_buffer = partial(read_message_sizes, tried="Invalid buffer size: AMOUNT")


# Reads a message on a failed allocation of host memory.
read_host_request = partial(read_message_sizes, tried="tried to allocate AMOUNT")
# Reads a message on NCCL's buffers.
read_nccl = partial(read_message_sizes, tried="Failed to CUDA (?:host )?c?alloc(?: async)? AMOUNT")
