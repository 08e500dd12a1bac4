"""Diagnosis of why a GPU allocation failed, from the sizes in the error message."""

from __future__ import annotations

from memprof.allocator.rounding import FRAGMENTED_SHARE
from memprof.device.context import CONTEXT_BYTES
from memprof.doctor.diagnosis import Cause, MessageSizes, PrintedSize
from memprof.units import GIB, format_bytes

_LARGE_SHARE = 0.25  # Fraction of the GPU from which on the request alone is the cause.
_FREE_SHARE = 0.05  # Fraction of the GPU: with less free memory, the GPU counts as full.
_MIN_UNNAMED = GIB
# Memory of unlisted processes may belong to this process's libraries (NCCL, other contexts), or to a desktop on a small
# GPU; from these fractions of the GPU on it belongs to other processes.
_UNNAMED_SHARE, _SURE_SHARE, _SMALL_GPU = 0.1, 0.25, 8 * GIB


def sum_other_processes(sizes: MessageSizes) -> int | None:
    """Return the bytes of other processes on the GPU; None if the message does not show them."""
    named = sum(size.num_bytes for _, size in list_other_processes(sizes))
    if named:
        return named
    total, free, mine = sizes.total, sizes.free, find_own_bytes(sizes)
    if total is None or free is None or mine is None:
        return None
    return max(0, total.num_bytes - free.num_bytes - mine)


def find_own_bytes(sizes: MessageSizes) -> int | None:
    """Return the bytes of this process as the driver reports them, or else reserved bytes and CUDA context."""
    if own := sizes.process or _find_own_size(sizes):
        return own.num_bytes
    held = sizes.reserved or sizes.allocated
    return None if held is None else held.num_bytes + CONTEXT_BYTES


def _find_own_size(sizes: MessageSizes) -> PrintedSize | None:
    """Return the size of this process, if the message lists it as another process."""
    foreign = list_other_processes(sizes)
    return next((size for pid, size in sizes.others if (pid, size) not in foreign), None)


def list_other_processes(sizes: MessageSizes) -> tuple[tuple[int, PrintedSize], ...]:
    """Return pid and size of the listed processes other than this one.

    In a container, NVML reports pids of the host, so that torch's message lists its own process as another one. One of
    them is this process if the GPU could not hold both its memory and this process's reserved memory.
    """
    if sizes.process is not None or not sizes.others or sizes.reserved is None or sizes.total is None:
        return sizes.others
    together = sum(size.num_bytes for _, size in sizes.others) + sizes.reserved.num_bytes
    if together <= 1.01 * sizes.total.num_bytes:
        return sizes.others
    able = [(size.num_bytes, pid) for pid, size in sizes.others if size.high >= sizes.reserved.low]
    own = min(able)[1] if able else None
    return tuple((pid, size) for pid, size in sizes.others if pid != own)


def find_cause(sizes: MessageSizes) -> tuple[Cause, tuple[str, ...]]:
    """Return the cause, and sentences that explain the sizes."""
    if sizes.tried is None:
        return Cause.DEVICE_MEMORY, ()
    cause, why = _choose_cause(sizes, sizes.tried)
    return cause, tuple(filter(None, (why, *_describe_sizes(sizes))))


def _choose_cause(sizes: MessageSizes, request: PrintedSize) -> tuple[Cause, str]:
    """Return the cause of the failed allocation of `tried`, and a sentence with the evidence."""
    want, total, free = request.num_bytes, sizes.total, sizes.free
    reserved, allocated = sizes.reserved, sizes.allocated
    unused = max(0, reserved.num_bytes - allocated.num_bytes) if reserved and allocated else 0
    allowed, held = sizes.allowed, reserved or allocated
    if allowed is not None and held is not None and held.num_bytes + want > allowed.low:
        return Cause.MEMORY_LIMIT, f"the program's own limit is {allowed.text}, and {held.text} of it are in use"
    if total is None or not total.num_bytes:
        return Cause.DEVICE_MEMORY, ""
    if request.low > total.high:
        return Cause.LARGE_TENSOR, f"the request alone is larger than the GPU: {request.text} of {total.text}"
    if free is not None and free.low >= request.high and free.num_bytes >= _FREE_SHARE * total.num_bytes:
        return Cause.FREE_REFUSED, f"{free.text} are free, and the driver refused {request.text}"
    others = sum_other_processes(sizes) or 0
    missing = want - (free.num_bytes if free else 0)
    fits = unused >= missing
    fragmented = fits and reserved is not None and unused >= FRAGMENTED_SHARE * reserved.num_bytes
    if others >= missing and _is_foreign(sizes, others, total.num_bytes, fits=fits):
        return Cause.OTHER_PROCESSES, f"other processes have {format_bytes(others)}; without them the request would fit"
    if fragmented:
        beside = f", beside {free.text} free on the GPU" if unused < want and free else ""
        why = f"torch holds {format_bytes(unused)} unused{beside}, in pieces too small for {request.text}"
        return Cause.FRAGMENTATION, why
    mine = find_own_bytes(sizes)
    if free is None and mine is not None and want + mine < (1 - _UNNAMED_SHARE) * total.num_bytes:
        what = "others have it, or the driver refuses a request of this size"
        return Cause.DEVICE_MEMORY, f"{format_bytes(total.num_bytes - mine)} of the GPU are not this process's: {what}"
    if want >= _LARGE_SHARE * total.num_bytes:
        return Cause.LARGE_TENSOR, f"one request of {request.text} is {100 * want / total.num_bytes:.0f}% of the GPU"
    if fits and unused and reserved is not None:
        tensors = f"{100 * (1 - unused / reserved.num_bytes):.0f}% of what torch holds are tensors"
        more = f"in one piece the rest would serve this request, and {format_bytes(unused - missing)} more"
        return Cause.GPU_FULL, f"{tensors}; {more}"
    return Cause.GPU_FULL, ""


def _is_foreign(sizes: MessageSizes, others: int, total: int, *, fits: bool) -> bool:
    """Return whether other processes certainly have `others` bytes, and enough to cause the error."""
    if others < _MIN_UNNAMED:
        return False
    # The driver's value for this process is reliable; a difference of other values is not.
    share = _SURE_SHARE if fits or total < _SMALL_GPU else _UNNAMED_SHARE
    return bool(list_other_processes(sizes)) or sizes.process is not None or others >= share * total


def _describe_sizes(sizes: MessageSizes) -> list[str]:
    """Return sentences about sizes that are not part of the cause."""
    said = []
    total, reserved, allocated = sizes.total, sizes.reserved, sizes.allocated
    held = reserved or allocated
    if allocated is not None:
        unused = 0 if reserved is None else max(0, reserved.num_bytes - allocated.num_bytes)
        beside = "" if reserved is None else f", and {format_bytes(unused)} are reserved and unused"
        said.append(f"tensors take {allocated.text}{beside}")
    if total is not None and held is not None and held.low > total.high:
        spills = "the driver spills into host memory (Windows, WSL), which is slow"
        said.append(f"{held.text} on a GPU of {total.text}: {spills}")
    if sizes.private_pools is not None:
        said.append(f"{sizes.private_pools.text} are in private pools (CUDA graphs)")
    own = sizes.process or _find_own_size(sizes)
    if own is not None and held is not None:
        outside = own.num_bytes - held.num_bytes
        if outside > 0:
            # Only messages of MPS have the process's memory without reserved memory.
            what = "graphs and buffers of Metal" if reserved is None else "context, libraries, NCCL"
            said.append(f"{format_bytes(outside)} of this process are outside torch's allocator: {what}")
    for pid, size in list_other_processes(sizes):
        said.append(f"process {pid} has {size.text}" if pid else f"other processes have {size.text}")
    return said
