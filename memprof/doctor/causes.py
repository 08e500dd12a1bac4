"""Diagnosis of why a GPU allocation failed, from the sizes in the error message."""

from __future__ import annotations

from memprof.allocator.rounding import FRAGMENTED_SHARE
from memprof.device.context import CONTEXT_BYTES, LARGEST_CONTEXT_BYTES
from memprof.doctor.diagnosis import Cause, MessageSizes, PrintedSize
from memprof.doctor.message_sizes import subtract_sizes
from memprof.units import GIB, format_bytes

_LARGE_SHARE = 0.25  # Fraction of the GPU from which on the request alone is the cause.
_FREE_SHARE = 0.05  # Fraction of the GPU: with less free memory, the GPU counts as full.
_MIN_UNLISTED_BYTES = GIB
# Memory of unlisted processes may belong to this process's libraries (NCCL, other contexts), or to a desktop on a small
# GPU; from these fractions of the GPU on it belongs to other processes.
_UNLISTED_SHARE, _CERTAIN_SHARE, _SMALL_GPU = 0.1, 0.25, 8 * GIB


def sum_other_processes(sizes: MessageSizes) -> int | None:
    """Return the bytes that other processes have on the GPU; None if the message's sizes do not show them."""
    listed_bytes = sum(size.num_bytes for _, size in list_other_processes(sizes))
    if listed_bytes:
        return listed_bytes
    total, free, own_bytes = sizes.total, sizes.free, find_own_bytes(sizes)
    if total is None or free is None or own_bytes is None:
        return None
    return max(0, total.num_bytes - free.num_bytes - own_bytes)


def find_own_bytes(sizes: MessageSizes) -> int | None:
    """Return the bytes of the failed process: the driver's value, or else reserved memory plus the CUDA context."""
    if own_size := sizes.process or _find_own_size(sizes):
        return own_size.num_bytes
    torch_size = sizes.reserved or sizes.allocated
    return None if torch_size is None else torch_size.num_bytes + CONTEXT_BYTES


def find_outside_size(sizes: MessageSizes) -> PrintedSize | None:
    """Return the memory of the GPU that is neither free nor reserved by torch; None if the message says whose it is.

    torch before 2.1 does not say how much memory the process has, nor does torch on Windows and in containers.
    """
    total, free, torch_size = sizes.total, sizes.free, sizes.reserved
    if sizes.process is not None or sizes.others or total is None or free is None or torch_size is None:
        return None
    size = subtract_sizes(total, free, torch_size)
    return size if size.num_bytes else None


def _find_own_size(sizes: MessageSizes) -> PrintedSize | None:
    """Return the size of the failed process if the message lists it among other processes, else None."""
    other_processes = list_other_processes(sizes)
    return next((size for pid, size in sizes.others if (pid, size) not in other_processes), None)


def list_other_processes(sizes: MessageSizes) -> tuple[tuple[int, PrintedSize], ...]:
    """Return pid and size of the listed processes except the failed process.

    In a container, NVML reports pids of the host, so torch's message lists the failed process among the others. It is
    one of them if the GPU could not hold the memory of all listed processes and torch's reserved memory.
    """
    if sizes.process is not None or not sizes.others or sizes.reserved is None or sizes.total is None:
        return sizes.others
    total_bytes = sum(size.num_bytes for _, size in sizes.others) + sizes.reserved.num_bytes
    if total_bytes <= 1.01 * sizes.total.num_bytes:
        return sizes.others
    candidates = [(size.num_bytes, pid) for pid, size in sizes.others if size.high >= sizes.reserved.low]
    own_pid = min(candidates)[1] if candidates else None
    return tuple((pid, size) for pid, size in sizes.others if pid != own_pid)


def find_cause(sizes: MessageSizes) -> tuple[Cause, tuple[str, ...]]:
    """Return the cause of a failed allocation, and sentences that explain it by the message's sizes."""
    if sizes.tried is None:
        return Cause.DEVICE_MEMORY, ()
    cause, evidence = _choose_cause(sizes, sizes.tried)
    return cause, tuple(filter(None, (evidence, *_describe_sizes(sizes))))


def _choose_cause(sizes: MessageSizes, request: PrintedSize) -> tuple[Cause, str]:
    """Return the cause of the failed allocation of size `request`, and a sentence with the evidence."""
    need, total, free = request.num_bytes, sizes.total, sizes.free
    reserved, allocated = sizes.reserved, sizes.allocated
    cached = max(0, reserved.num_bytes - allocated.num_bytes) if reserved and allocated else 0
    allowed, torch_size = sizes.allowed, reserved or allocated
    if allowed is not None and torch_size is not None and torch_size.num_bytes + need > allowed.low:
        return Cause.MEMORY_LIMIT, f"the program's own limit is {allowed.text}, and {torch_size.text} of it are in use"
    if total is None or not total.num_bytes:
        return Cause.DEVICE_MEMORY, ""
    if request.low > total.high:
        return Cause.LARGE_TENSOR, f"the request alone is larger than the GPU: {request.text} of {total.text}"
    if free is not None and free.low >= request.high and free.num_bytes >= _FREE_SHARE * total.num_bytes:
        return Cause.FREE_REFUSED, f"{free.text} are free, and the driver refused {request.text}"
    others = sum_other_processes(sizes) or 0
    shortfall = need - (free.num_bytes if free else 0)
    fits_cache = cached >= shortfall
    is_fragmented = fits_cache and reserved is not None and cached >= FRAGMENTED_SHARE * reserved.num_bytes
    if others >= shortfall and _belongs_to_others(sizes, others, total.num_bytes, fits_cache=fits_cache):
        return Cause.OTHER_PROCESSES, f"other processes have {format_bytes(others)}; without them the request would fit"
    if is_fragmented:
        free_text = f", beside {free.text} free on the GPU" if cached < need and free else ""
        evidence = f"torch holds {format_bytes(cached)} unused{free_text}, in pieces too small for {request.text}"
        return Cause.FRAGMENTATION, evidence
    own = find_own_bytes(sizes)
    if free is None and own is not None and need + own < (1 - _UNLISTED_SHARE) * total.num_bytes:
        text = "others have it, or the driver refuses a request of this size"
        return Cause.DEVICE_MEMORY, f"{format_bytes(total.num_bytes - own)} of the GPU are not this process's: {text}"
    if need >= _LARGE_SHARE * total.num_bytes:
        return Cause.LARGE_TENSOR, f"one request of {request.text} is {100 * need / total.num_bytes:.0f}% of the GPU"
    if fits_cache and cached and reserved is not None:
        tensors_text = f"{100 * (1 - cached / reserved.num_bytes):.0f}% of what torch holds are tensors"
        rest_text = f"in one piece the rest would serve this request, and {format_bytes(cached - shortfall)} more"
        return Cause.GPU_FULL, f"{tensors_text}; {rest_text}"
    return Cause.GPU_FULL, ""


def _belongs_to_others(sizes: MessageSizes, num_bytes: int, gpu_bytes: int, *, fits_cache: bool) -> bool:
    """Return whether `num_bytes` certainly belong to other processes, and are enough to cause the error."""
    if num_bytes < _MIN_UNLISTED_BYTES:
        return False
    # The driver's value for this process is reliable; a difference of other values is not.
    min_share = _CERTAIN_SHARE if fits_cache or gpu_bytes < _SMALL_GPU else _UNLISTED_SHARE
    return bool(list_other_processes(sizes)) or sizes.process is not None or num_bytes >= min_share * gpu_bytes


def _describe_sizes(sizes: MessageSizes) -> list[str]:
    """Return sentences on the sizes that do not determine the cause."""
    lines = []
    total, reserved, allocated = sizes.total, sizes.reserved, sizes.allocated
    torch_size = reserved or allocated
    if allocated is not None:
        cached = 0 if reserved is None else max(0, reserved.num_bytes - allocated.num_bytes)
        cached_text = "" if reserved is None else f", and {format_bytes(cached)} are reserved and unused"
        lines.append(f"tensors take {allocated.text}{cached_text}")
    if total is not None and torch_size is not None and torch_size.low > total.high:
        spill_text = "the driver spills into host memory (Windows, WSL), which is slow"
        lines.append(f"{torch_size.text} on a GPU of {total.text}: {spill_text}")
    if sizes.private_pools is not None:
        lines.append(f"{sizes.private_pools.text} are in private pools (CUDA graphs)")
    own_size = sizes.process or _find_own_size(sizes)
    if own_size is not None and torch_size is not None:
        extra = own_size.num_bytes - torch_size.num_bytes
        if extra > 0:
            # Only messages of MPS have the process's memory without reserved memory.
            origin = "graphs and buffers of Metal" if reserved is None else "context, libraries, NCCL"
            lines.append(f"{format_bytes(extra)} of this process are outside torch's allocator: {origin}")
    if sizes.outside is not None:
        owner = "this process's context and libraries"
        if sizes.outside.num_bytes > LARGEST_CONTEXT_BYTES:
            owner += f" (at most {format_bytes(LARGEST_CONTEXT_BYTES)} where it was measured), and other processes"
        lines.append(f"{sizes.outside.text} of the GPU are neither free nor reserved by torch: {owner}")
    for pid, size in list_other_processes(sizes):
        lines.append(f"process {pid} has {size.text}" if pid else f"other processes have {size.text}")
    return lines
