"""The sizes in the out-of-memory messages of torch, vLLM, XLA and others.

Formats: `malloc` of c10/cuda/CUDACachingAllocator.cpp (1.13 to 2.15; allocator/messages.py prints them),
c10/cuda/CUDAMallocAsyncAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm, and vLLM's v1/worker/gpu_worker.py.
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
_UNITS = {"bytes": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B)\b"
_MAX_SIZE = 1 << 60  # NVML reports unknown sizes as the largest integer.


def read_size(number: str, unit: str) -> PrintedSize:
    """Return the size printed as `number` and `unit`, with the range of bytes that are printed so."""
    factor = _UNITS.get(unit.lower()) or _UNITS[unit[0].lower()]
    value = Decimal(number)
    if factor == 1:
        return PrintedSize(f"{number} {unit}", int(value), int(value), int(value))
    exponent = value.as_tuple().exponent
    half_digit = Decimal(5) * Decimal(10) ** ((exponent if isinstance(exponent, int) else 0) - 1)
    low, high = (value - half_digit) * factor, (value + half_digit) * factor
    return PrintedSize(f"{number} {unit}", int(value * factor), max(0, math.ceil(low)), math.floor(high))


def _find_size(pattern: str, message: str) -> PrintedSize | None:
    match = re.search(pattern.replace("AMOUNT", _AMOUNT), message)
    size = read_size(*match.groups()[-2:]) if match else None
    return None if size is None or size.num_bytes >= _MAX_SIZE else size


def _read_sizes(message: str, tried: str, device: str = "", **size_patterns: str) -> MessageSizes:
    """Return the sizes in `message`: by field of MessageSizes, the regular expression that finds its size at AMOUNT."""
    sizes: dict[str, Any] = {name: _find_size(pattern, message) for name, pattern in size_patterns.items()}
    match = re.search(device, message) if device else None
    return MessageSizes(
        tried=_find_size(tried, message), tried_is_segment=False, device=int(match[1]) if match else None, **sizes
    )


def _add_sizes(first: PrintedSize, second: PrintedSize) -> PrintedSize:
    """Return the sum of two sizes, with the sum of their ranges."""
    total = first.num_bytes + second.num_bytes
    return PrintedSize(f"{total / GIB:.2f} GiB", total, first.low + second.low, first.high + second.high)


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
        reserved = _add_sizes(allocated, unallocated)
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
    _read_sizes,
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
    sizes = _read_sizes(
        message, "Tried to allocate AMOUNT", total="max allowed: AMOUNT", allocated="MPS allocated: AMOUNT"
    )
    others = _find_size("other allocations: AMOUNT", message)
    if others is None or sizes.allocated is None:
        return sizes
    return replace(sizes, process=_add_sizes(sizes.allocated, others))


# Reads a message on a buffer larger than Metal supports.
read_metal_buffer = partial(_read_sizes, tried="Invalid buffer size: AMOUNT")


def read_engine_budget(message: str) -> MessageSizes:
    """Return the sizes in the message of vLLM's check at startup: free and total memory; `tried` is its budget."""
    match = re.search(
        r"Free memory on device(?: \w+:(\d+))? \((\d+(?:\.\d+)?)/(\d+(?:\.\d+)?) GiB\) on startup is less than desired "
        r"GPU memory utilization \((?:\d+(?:\.\d+)?), (\d+(?:\.\d+)?) GiB\)",
        message,
    )
    if match is None:
        return MessageSizes(tried_is_segment=False)
    return MessageSizes(
        tried=read_size(match[4], "GiB"),
        tried_is_segment=False,
        device=int(match[1]) if match[1] else None,
        total=read_size(match[3], "GiB"),
        free=read_size(match[2], "GiB"),
    )


# Reads vLLM's message on a KV cache that is too small: needed and available bytes.
read_kv_cache = partial(
    _read_sizes,
    tried=r"at least one request with the model\w*.?s max seq len \(\d+\),? ?\(?AMOUNT",
    free=r"available KV cache memory \(AMOUNT\)",
)
# Reads a message on a failed allocation of host memory.
read_host_request = partial(_read_sizes, tried="tried to allocate AMOUNT")
# Bytes of an element of TensorFlow's types.
_TYPES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int32": 4, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}


def read_xla(message: str) -> MessageSizes:
    """Return the size of the failed allocation in a message of XLA or TensorFlow, printed in bytes or as a shape."""
    tensor = re.search(r"OOM when allocating tensor with shape\[([\d,]+)\] and type (\w+)", message)
    if tensor is None or tensor[2] not in _TYPES:
        return _read_sizes(message, "(?:trying to allocate|attempting to allocate) AMOUNT")
    num_bytes = math.prod(map(int, tensor[1].split(","))) * _TYPES[tensor[2]]
    size = PrintedSize(format_bytes(num_bytes), num_bytes, num_bytes, num_bytes)
    return MessageSizes(tried=size, tried_is_segment=False)


# Reads a message on NCCL's buffers.
read_nccl = partial(_read_sizes, tried="Failed to CUDA (?:host )?c?alloc(?: async)? AMOUNT")
# Reads a message of ggml (llama.cpp, ollama).
read_cuda_malloc = partial(_read_sizes, tried="allocating AMOUNT on device", device=r"on device (\d+)")
