"""The amounts in an out-of-memory message.

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

from memprof.doctor.diagnosis import Figures, Size
from memprof.units import GIB, KIB, MIB, TIB, format_bytes

# torch counts in powers of 1,024 under either spelling: its MPS allocator long printed "GB" for them.
_UNITS = {"bytes": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B)\b"
_NONSENSE = 1 << 60  # What NVML does not know it reports as the largest number; such amounts say nothing.


def read_size(number: str, unit: str) -> Size:
    """Return the size that was printed as `number` with `unit`, with the range of bytes that print the same."""
    factor = _UNITS.get(unit.lower()) or _UNITS[unit[0].lower()]
    value = Decimal(number)
    if factor == 1:
        return Size(f"{number} {unit}", int(value), int(value), int(value))
    exponent = value.as_tuple().exponent
    half = Decimal(5) * Decimal(10) ** ((exponent if isinstance(exponent, int) else 0) - 1)
    low, high = (value - half) * factor, (value + half) * factor
    return Size(f"{number} {unit}", int(value * factor), max(0, int(-(-low // 1))), int(high // 1))


def _find_size(pattern: str, text: str) -> Size | None:
    match = re.search(pattern.replace("AMOUNT", _AMOUNT), text)
    size = read_size(*match.groups()[-2:]) if match else None
    return None if size is None or size.num_bytes >= _NONSENSE else size


def _read_request(text: str, tried: str, device: str = "", **amounts: str) -> Figures:
    """Return the figures of an allocator's message that names the requested size."""
    found: dict[str, Any] = {name: _find_size(pattern, text) for name, pattern in amounts.items()}
    index = re.search(device, text) if device else None
    return Figures(
        tried=_find_size(tried, text), tried_is_segment=False, device=int(index[1]) if index else None, **found
    )


def _add_sizes(first: Size, second: Size) -> Size:
    """Return the sum of two sizes; their ranges add up."""
    total = first.num_bytes + second.num_bytes
    return Size(f"{total / GIB:.2f} GiB", total, first.low + second.low, first.high + second.high)


def caching_allocator(text: str) -> Figures:
    """Return the figures in a message of torch's caching allocator (CUDA, ROCm or XPU); `text` is one line."""
    tried = _find_size("Tried to allocate AMOUNT", text)
    allocated = _find_size("AMOUNT already allocated", text) or _find_size(
        "Of the allocated memory AMOUNT is allocated", text
    )
    reserved = _find_size("AMOUNT reserved in total by PyTorch", text)
    # Before 1.4 the last figure was "cached": what the allocator held beyond the allocated.
    unallocated = _find_size("AMOUNT is reserved by PyTorch but unallocated", text) or _find_size("AMOUNT cached", text)
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = _add_sizes(allocated, unallocated)
    process = _find_size("this process has AMOUNT memory in use", text)
    if process is not None and allocated is not None and process.high < allocated.low:
        process = None  # NVML knows nothing of processes on this system (WSL, a container)
    others = tuple(
        (int(pid), size)
        for pid, number, unit in re.findall(rf"Process (\d+) has {_AMOUNT} memory in use", text)
        if (size := read_size(number, unit)).num_bytes < _NONSENSE
    )
    whole_mib = tried is not None and tried.text.endswith("MiB") and tried.num_bytes % MIB == 0
    segment = tried is not None and (tried.text.endswith("GiB") or (whole_mib and tried.num_bytes // MIB % 2 == 0))
    device = re.search(r"GPU (\d+)[; ]", text) or re.search(r"XPU (\d+)[; ]", text)
    return Figures(
        tried=tried,
        tried_is_segment=segment,
        device=int(device[1]) if device else None,
        total=_find_size("AMOUNT total capacity", text) or _find_size(r"total capac(?:i)?ty of AMOUNT", text),
        free=_find_size("of which AMOUNT is free", text) or _find_size("AMOUNT free[;)]", text),
        process=process,
        others=others,
        allowed=_find_size("AMOUNT allowed;", text),
        allocated=allocated,
        reserved=reserved,
        private_pools=_find_size("with AMOUNT allocated in private pools", text),
    )


# Of the cudaMallocAsync backend: it asks for exactly what was requested.
malloc_async = partial(
    _read_request,
    tried="Requested ?: ?AMOUNT",
    device=r"Allocation on device (\d+)",
    total="Device limit ?: ?AMOUNT",
    free=r"Free \(according to CUDA\) ?: ?AMOUNT",
    allowed=r"PyTorch limit \(set by user-supplied memory fraction\) ?: ?AMOUNT",
    allocated="Currently allocated ?: ?AMOUNT",
)


def mps(text: str) -> Figures:
    """Return the figures of torch's allocator for Apple's GPUs, whose capacity is the allowed maximum.

    "Other allocations" belong to this process too: Metal counts the process's memory outside torch's pools.
    """
    found = _read_request(
        text, "Tried to allocate AMOUNT", total="max allowed: AMOUNT", allocated="MPS allocated: AMOUNT"
    )
    others = _find_size("other allocations: AMOUNT", text)
    if others is None or found.allocated is None:
        return found
    return replace(found, process=_add_sizes(found.allocated, others))


# Of a buffer that Metal does not make, however much is free.
metal_buffer = partial(_read_request, tried="Invalid buffer size: AMOUNT")


def engine_budget(text: str) -> Figures:
    """Return the figures of vLLM's check at startup: free and total memory, and its memory budget."""
    match = re.search(
        r"Free memory on device(?: \w+:(\d+))? \((\d+(?:\.\d+)?)/(\d+(?:\.\d+)?) GiB\) on startup is less than desired "
        r"GPU memory utilization \((?:\d+(?:\.\d+)?), (\d+(?:\.\d+)?) GiB\)",
        text,
    )
    if match is None:
        return Figures(tried_is_segment=False)
    return Figures(
        tried=read_size(match[4], "GiB"),
        tried_is_segment=False,
        device=int(match[1]) if match[1] else None,
        total=read_size(match[3], "GiB"),
        free=read_size(match[2], "GiB"),
    )


# Of vLLM's later words for a KV cache that is too small: what a sequence needs, and what there is.
kv_cache = partial(
    _read_request,
    tried=r"at least one request with the model\w*.?s max seq len \(\d+\),? ?\(?AMOUNT",
    free=r"available KV cache memory \(AMOUNT\)",
)
# Of a failed allocation for host memory (bytes); pinned memory among it.
host_request = partial(_read_request, tried="tried to allocate AMOUNT")
# Bytes of an element of TensorFlow's types.
_TYPES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int32": 4, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}


def xla(text: str) -> Figures:
    """Return the figures in a message of XLA or TensorFlow: bytes, a size with a unit, or a tensor's shape."""
    tensor = re.search(r"OOM when allocating tensor with shape\[([\d,]+)\] and type (\w+)", text)
    if tensor is None or tensor[2] not in _TYPES:
        return _read_request(text, "(?:trying to allocate|attempting to allocate) AMOUNT")
    num_bytes = math.prod(map(int, tensor[1].split(","))) * _TYPES[tensor[2]]
    return Figures(tried=Size(format_bytes(num_bytes), num_bytes, num_bytes, num_bytes), tried_is_segment=False)


nccl = partial(_read_request, tried="Failed to CUDA (?:host )?c?alloc(?: async)? AMOUNT")  # Of NCCL's own buffers.
# Of ggml (llama.cpp, ollama): MiB, exactly what cudaMalloc was requested.
cuda_malloc = partial(_read_request, tried="allocating AMOUNT on device", device=r"on device (\d+)")
