"""The CUDA GPU of a measured run, and torch's peak counters, which the program and memprof share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.allocator.cublas import CublasWorkspace
from memprof.device.context import get_context_bytes
from memprof.device.nvml import Nvml, read_gpu_usage
from memprof.errors import MemprofError, UsageError, first_line
from memprof.measured.history import CounterGap, History
from memprof.patching import Patch
from memprof.torch_private import cuda
from memprof.trace.facts import NvmlFacts, OtherProcess
from memprof.units import format_bytes

MAX_ENTRIES = 2_000_000  # entries of the allocator's history; a longer run loses the first entries
# Makes torch check for a GPU with NVML in place of CUDA.
_NVML_CHECK_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


class CudaGpu(NamedTuple):
    """The current GPU as CUDA describes it, in bytes."""

    name: str
    total_bytes: int
    usable_bytes: int  # Free bytes and bytes reserved by torch; other processes use the rest.
    # This process's bytes outside the allocator, by NVML; the usual size where NVML does not name processes.
    context_bytes: int


def current_gpu() -> CudaGpu:
    """Return the current GPU; raise MemprofError if there is no GPU, or CUDA cannot use it."""
    _refuse_without_cuda()
    try:
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        own_bytes = read_gpu_usage(get_nvml_key()).own_bytes
        context = get_context_bytes(torch.cuda.get_device_capability()) if own_bytes is None else own_bytes - reserved
        usable_bytes = min(free_bytes + reserved, total_bytes)
        return CudaGpu(name, total_bytes, usable_bytes, max(min(context, total_bytes - usable_bytes), 0))
    except RuntimeError as error:
        raise MemprofError(
            "the CUDA GPU cannot be used",
            value=first_line(error),
            hint="see with nvidia-smi whether it is in use or needs a reset",
        ) from None


def _refuse_without_cuda() -> None:
    reason = cuda_unavailable_reason()
    if reason is not None:
        hint = "leave out --device cuda, or say cpu"
        raise MemprofError("there is no CUDA GPU to measure on", value=reason, hint=hint)


def check_gpus(num_gpus: int) -> None:
    """Raise UsageError if this machine has fewer than `num_gpus` GPUs, MemprofError if CUDA has no usable GPU. CUDA is
    not initialized, so that processes may be forked."""
    _refuse_without_cuda()
    if torch.cuda.device_count() < num_gpus:
        raise UsageError(
            f"{num_gpus} processes are to be measured on a GPU each", value=f"{torch.cuda.device_count()} are here",
            hint=f"leave out --device: on virtual GPUs there may be {num_gpus}",
        )  # fmt: skip


def get_cublas_workspace(gpu: int) -> CublasWorkspace:
    """Return the workspace of torch's cuBLAS handles on a GPU."""
    major, minor = torch.__version__.split(".")[:2]
    return CublasWorkspace.for_gpu(torch.cuda.get_device_capability(gpu), (int(major), int(minor)))


def set_current_gpu(gpu: int) -> None:
    """Make `gpu` this process's current GPU."""
    torch.cuda.set_device(gpu)


def get_nvml_key() -> int | str:
    """Return NVML's key of the current GPU: CUDA's ordinal is NVML's index only where no GPU is hidden."""
    current = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(current), "uuid", None)
    return current if uuid is None else str(uuid)


def cuda_unavailable_reason() -> str | None:
    """Return why this process has no CUDA GPU; None if there is one. CUDA is not initialized."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    previous = os.environ.get(_NVML_CHECK_VARIABLE)
    os.environ[_NVML_CHECK_VARIABLE] = "1"
    try:
        return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no driver or no GPU"
    finally:
        del os.environ[_NVML_CHECK_VARIABLE]
        os.environ.update({} if previous is None else {_NVML_CHECK_VARIABLE: previous})


def check_allocator() -> None:
    """Raise MemprofError if the GPU's allocator is not torch's own caching allocator."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        raise MemprofError(
            "memory of this allocator cannot be measured: it keeps no history of what it did", value=backend,
            hint="take backend:... out of PYTORCH_CUDA_ALLOC_CONF, or simulate: leave out --device",
        )  # fmt: skip


def keep_recording_history(original: Callable[..., None]) -> Iterator[Patch]:
    """Yield a patch that keeps the allocator's history enabled when the program enables or disables it."""

    @functools.wraps(original)
    def record(enabled: Any = "all", *args: Any, **options: Any) -> None:
        if enabled is True:  # the call of torch 2.0, with options of its own
            enabled, args, options = "all", (), {}
        if enabled:
            options.pop("clear_history", None)
            original(enabled, *args[:2], **{**options, "max_entries": MAX_ENTRIES})  # the third is max_entries

    yield cuda.record_memory_history.patch(record)


def find_incompleteness(
    history: History, gap: CounterGap | None, missing_bytes: int, max_entries: int = MAX_ENTRIES
) -> MemprofError | None:
    """Return the error that says why the recorded history is incomplete; None if it is complete.

    `gap` is the largest gap to torch's counters, `missing_bytes` the difference to the snapshot at the end of the run.
    """
    if history.num_entries >= max_entries:
        return MemprofError(
            "the run allocated and freed more often than torch's allocator can remember",
            value=f"{max_entries:,} entries", hint="measure fewer steps, or simulate: leave out --device",
        )  # fmt: skip
    if gap is not None:
        counted, recorded = format_bytes(gap.counted_bytes), format_bytes(gap.recorded_bytes)
        evidence = f"the counters say {counted}, what was recorded adds up to {recorded}"
    elif missing_bytes:
        evidence = f"the allocator's blocks at the end and what was recorded differ by {format_bytes(missing_bytes)}"
    elif history.num_unmatched:
        evidence = f"{history.num_unmatched:,} allocations and frees that the profiler saw"
    else:
        return None
    return MemprofError(
        "not all that the run did to the GPU's memory was recorded", value=evidence,
        hint="simulate: leave out --device; and please report this, with the program",
    )  # fmt: skip


class NvmlUse:
    """Context manager: connection to NVML during a run, for GPU memory outside torch's allocator."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._gpu: int | str = 0

    def __enter__(self) -> NvmlUse:
        self._gpu = get_nvml_key()
        self._nvml.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._nvml.__exit__(None, None, None)

    def used_bytes(self) -> int | None:
        """Return the bytes in use on the GPU by all processes; None if NVML is not available."""
        return self._nvml.read_usage(self._gpu).used_bytes

    def facts(self) -> NvmlFacts:
        """Return NVML's current values, from which ledger/bridge.py explains device memory beyond reserved memory."""
        usage = self._nvml.read_usage(self._gpu)
        other_processes = [process for process in usage.by_process if process.pid != os.getpid()]
        processes = tuple(OtherProcess(process.pid, process.name, process.used_bytes) for process in other_processes)
        return NvmlFacts(
            reserved_bytes=torch.cuda.memory_reserved(), process_bytes=usage.own_bytes, used_bytes=usage.used_bytes,
            processes=None if usage.used_bytes is None else processes, note=usage.note,
        )  # fmt: skip


_STATS_FUNCTIONS = (cuda.memory_stats, cuda.accelerator_get_device_stats)
# Functions that `torch.cuda.memory` and `torch.accelerator.memory` call, both for the same counters.
_RESET_FUNCTIONS = (cuda.reset_peak_memory_stats, cuda.accelerator_reset_peak_stats)


class SharedPeaks:
    """Reader of torch's peak counters, with patches that hide its resets of the peaks from the program.

    A process has one set of counters per GPU. A peak that one side's reset erases is kept here for the other side.
    """

    def __init__(self) -> None:
        self._read_stats: Callable[[int], dict[str, Any]] = _STATS_FUNCTIONS[0].get(lambda device: {})
        self._reset_peaks: Callable[[int], None] = _RESET_FUNCTIONS[0].get(lambda device: None)
        self._peaks_for_memprof: dict[int, int] = {}  # by GPU, bytes: the peak before the program's resets
        self._peaks_for_program: dict[int, dict[str, Any]] = {}  # by GPU: the peaks before memprof's resets

    def take_peak(self, device: int) -> int:
        """Return the peak of allocated bytes on a GPU since the last call, and reset the peak."""
        stats = self._read_stats(device)
        self._peaks_for_program[device] = _raise_peaks(stats, self._peaks_for_program.get(device, {}))
        self._reset_peaks(device)
        return max(_get_peak(stats), self._peaks_for_memprof.pop(device, 0))

    def requested_bytes(self, device: int) -> int:
        """Return the requested bytes of live allocations on a GPU."""
        return self._read_stats(device)["requested_bytes"]["all"]["current"]

    def patches(self) -> Iterator[Patch]:
        """Yield patches of the private functions by which a program reads and resets the counters."""
        for names, wrap in ((_STATS_FUNCTIONS, self._wrap_read), (_RESET_FUNCTIONS, self._wrap_reset)):
            yield from (name.patch(wrap(name.get())) for name in names if name.exists())

    def _wrap_read(self, original: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        return lambda device: _raise_peaks(original(device), self._peaks_for_program.get(device, {}))

    def _wrap_reset(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            self._peaks_for_memprof[device] = max(
                _get_peak(self._read_stats(device)), self._peaks_for_memprof.get(device, 0)
            )
            self._peaks_for_program.pop(device, None)
            original(device)

        return reset


def _get_peak(stats: dict[str, Any]) -> int:
    return stats["allocated_bytes"]["all"]["peak"]


def _raise_peaks(stats: dict[str, Any], minimum: dict[str, Any]) -> dict[str, Any]:
    """Return `stats` with each peak at least as high as in `minimum`."""
    result = {}
    for name, value in stats.items():
        if isinstance(value, dict):
            value = _raise_peaks(value, minimum.get(name, {}))
        elif name == "peak":
            value = max(value, minimum.get(name, 0))
        result[name] = value
    return result
