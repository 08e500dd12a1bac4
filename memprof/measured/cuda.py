"""The CUDA GPU that a run is measured on, and torch's peak counters, shared by the program and memprof."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memprof.device.context import context_bytes_of
from memprof.device.cublas import CublasWorkspace
from memprof.device.nvml import Nvml, read_gpu_usage
from memprof.errors import MemprofError, UsageError, first_line
from memprof.measured.history import CounterGap, History
from memprof.patching import Patch
from memprof.torch_private import cuda
from memprof.trace.facts import NvmlFacts, OtherProcess
from memprof.units import format_bytes

MAX_ENTRIES = 2_000_000  # of the allocator's history; a run that has more loses its beginning
# Has torch ask the driver's library whether there is a GPU, in place of CUDA.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class CudaGpu(NamedTuple):
    """The current GPU as CUDA describes it, in bytes."""

    name: str
    total_bytes: int
    usable_bytes: int  # For torch's allocator: what is free, and what it holds already. Other processes have the rest.
    # Of this process outside the allocator. NVML says it; where it may not name processes, the usual size is taken.
    context_bytes: int


def current_gpu() -> CudaGpu:
    """The current GPU. Raises MemprofError: there is none, or CUDA cannot use it."""
    _refuse_without_cuda()
    try:
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        own = read_gpu_usage(nvml_gpu()).own_bytes
        context = context_bytes_of(torch.cuda.get_device_capability()) if own is None else own - reserved
        usable = min(free + reserved, total)
        return CudaGpu(name, total, usable, max(min(context, total - usable), 0))
    except RuntimeError as error:
        raise MemprofError(
            "the CUDA GPU cannot be used",
            value=first_line(error),
            hint="see with nvidia-smi whether it is in use or needs a reset",
        ) from None


def _refuse_without_cuda() -> None:
    why = cuda_unavailable_reason()
    if why is not None:
        raise MemprofError("there is no CUDA GPU to measure on", value=why, hint="leave out --device cuda, or say cpu")


def check_gpus(number: int) -> None:
    """Return whether this machine has so many GPUs. They are not used, so that processes may be forked that do.
    Raises MemprofError: it has none that CUDA can use; UsageError: it has fewer."""
    _refuse_without_cuda()
    if torch.cuda.device_count() < number:
        raise UsageError(
            f"{number} processes are to be measured on a GPU each", value=f"{torch.cuda.device_count()} are here",
            hint=f"leave out --device: on virtual GPUs there may be {number}",
        )  # fmt: skip


def cublas_workspace(number: int) -> CublasWorkspace:
    """Return what torch's handles of cuBLAS take on a GPU."""
    major, minor = torch.__version__.split(".")[:2]
    return CublasWorkspace.of(torch.cuda.get_device_capability(number), (int(major), int(minor)))


def set_current_gpu(number: int) -> None:
    """Make it this process's current GPU."""
    torch.cuda.set_device(number)


def nvml_gpu() -> int | str:
    """The current GPU as NVML knows it: CUDA's ordinal is NVML's index only where no GPU is hidden."""
    current = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(current), "uuid", None)
    return current if uuid is None else str(uuid)


def cuda_unavailable_reason() -> str | None:
    """Return why this process has no CUDA GPU, None if it has one. CUDA does not begin: the process may be forked."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no driver or no GPU"
    finally:
        del os.environ[_ASK_NVML]
        os.environ.update({} if before is None else {_ASK_NVML: before})


def check_allocator() -> None:
    """Raise MemprofError if torch's own caching allocator is not what serves the GPU."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        raise MemprofError(
            "memory of this allocator cannot be measured: it keeps no history of what it did", value=backend,
            hint="take backend:... out of PYTORCH_CUDA_ALLOC_CONF, or simulate: leave out --device",
        )  # fmt: skip


def keep_recording_history(original: Callable[..., None]) -> Iterator[Patch]:
    """Let a program record the allocator's history too, for which there is one switch: memprof's own goes on."""

    @functools.wraps(original)
    def record(enabled: Any = "all", *args: Any, **options: Any) -> None:
        if enabled is True:  # the call of torch 2.0, with options of its own
            enabled, args, options = "all", (), {}
        if enabled:
            options.pop("clear_history", None)
            original(enabled, *args[:2], **{**options, "max_entries": MAX_ENTRIES})  # the third is max_entries

    yield cuda.record_memory_history.patch(record)


def why_incomplete(
    history: History, difference: CounterGap | None, missing: int, max_entries: int = MAX_ENTRIES
) -> MemprofError | None:
    """Return why what was recorded is no account of the GPU's memory; None if it is one.

    `difference` is that to torch's counters, and `missing` the bytes by which the snapshot of the end differs.
    """
    if history.num_entries >= max_entries:
        return MemprofError(
            "the run allocated and freed more often than torch's allocator can remember",
            value=f"{max_entries:,} entries", hint="measure fewer steps, or simulate: leave out --device",
        )  # fmt: skip
    if difference is not None:
        counted, recorded = difference.counted_bytes, difference.recorded_bytes
        says = f"the counters say {format_bytes(counted)}, what was recorded adds up to {format_bytes(recorded)}"
    elif missing:
        says = f"the allocator's blocks at the end and what was recorded differ by {format_bytes(missing)}"
    elif history.unmatched:
        says = f"{history.unmatched:,} allocations and frees that the profiler saw"
    else:
        return None
    return MemprofError(
        "not all that the run did to the GPU's memory was recorded", value=says,
        hint="simulate: leave out --device; and please report this, with the program",
    )  # fmt: skip


class NvmlUse:
    """A context manager: what is on the GPU beside torch's own segments, as NVML sees it during a run."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._gpu: int | str = 0

    def __enter__(self) -> NvmlUse:
        self._gpu = nvml_gpu()
        self._nvml.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._nvml.__exit__(None, None, None)

    def used_bytes(self) -> int | None:
        """Return the bytes of the whole GPU that are in use, by anybody; None: NVML cannot be asked."""
        return self._nvml.use(self._gpu).used_bytes

    def facts(self) -> NvmlFacts:
        """Return what the bridge (ledger/bridge.py) takes from this moment."""
        use = self._nvml.use(self._gpu)
        others = [process for process in use.by_process if process.pid != os.getpid()]
        seen = tuple(OtherProcess(process.pid, process.name, process.used_bytes) for process in others)
        return NvmlFacts(
            reserved_bytes=torch.cuda.memory_reserved(), process_bytes=use.own_bytes, used_bytes=use.used_bytes,
            processes=None if use.used_bytes is None else seen, note=use.note,
        )  # fmt: skip


_READ = (cuda.memory_stats, cuda.accelerator_get_device_stats)
# What `torch.cuda.memory` and `torch.accelerator.memory` call, both for the same counters.
_RESET = (cuda.reset_peak_memory_stats, cuda.accelerator_reset_peak_stats)


class SharedPeaks:
    """memprof's own reading of the peak counters, and patches in which the program's go on as if it were alone.

    There is one set for a process and a GPU. What a reset of the one takes away from the other is kept here for it.
    """

    def __init__(self) -> None:
        self._read: Callable[[int], dict[str, Any]] = _READ[0].get(lambda device: {})
        self._reset: Callable[[int], None] = _RESET[0].get(lambda device: None)
        self._ours: dict[int, int] = {}  # by GPU, bytes: the peak that the program's resets took from memprof
        self._programs: dict[int, dict[str, Any]] = {}  # by GPU: the peaks that memprof's resets took from the program

    def take(self, device: int) -> int:
        """The most that was allocated on the GPU since this was last called, in bytes."""
        stats = self._read(device)
        self._programs[device] = _highest(stats, self._programs.get(device, {}))
        self._reset(device)
        return max(_peak(stats), self._ours.pop(device, 0))

    def requested_bytes(self, device: int) -> int:
        """Return what is allocated on the GPU now, as it was requested, in bytes."""
        return self._read(device)["requested_bytes"]["all"]["current"]

    def patches(self) -> Iterator[Patch]:
        """The functions that a program's calls come down to."""
        for names, wrap in ((_READ, self._wrap_read), (_RESET, self._wrap_reset)):
            yield from (name.patch(wrap(name.get())) for name in names if name.exists())

    def _wrap_read(self, original: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        return lambda device: _highest(original(device), self._programs.get(device, {}))

    def _wrap_reset(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            self._ours[device] = max(_peak(self._read(device)), self._ours.get(device, 0))
            self._programs.pop(device, None)
            original(device)

        return reset


def _peak(stats: dict[str, Any]) -> int:
    return stats["allocated_bytes"]["all"]["peak"]


def _highest(stats: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """`stats` with each peak at least as high as in `kept`."""
    found = {}
    for name, value in stats.items():
        if isinstance(value, dict):
            value = _highest(value, kept.get(name, {}))
        elif name == "peak":
            value = max(value, kept.get(name, 0))
        found[name] = value
    return found
