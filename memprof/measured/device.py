"""`MeasuredDevice`: the context manager that records a workload's memory use on the CPU or on a CUDA GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch.profiler import ProfilerActivity

from memprof.allocator.cublas import CublasWorkspace
from memprof.errors import MemprofError
from memprof.measured import cuda
from memprof.measured.cuda import NvmlUse, SharedPeaks
from memprof.measured.history import CounterSample, History, find_largest_gap, get_live_blocks, read_history
from memprof.measured.marks import Counters, Mark, Marks, OwnerMark
from memprof.measured.merge import collect_allocations, merge
from memprof.measured.operators import Profile, quiet_profiler, read_events
from memprof.patching import Patch
from memprof.torch_private import autograd
from memprof.torch_private import cuda as private_cuda
from memprof.torch_private.check import check_required_names
from memprof.trace.events import CPU, GPU, HOST, NONE, EventKind, ModuleRole, Owner, Phase, PhaseKind, Role, Trace
from memprof.trace.facts import Facts
from memprof.trace.snapshot import Action
from memprof.watch.watch import Watch
from memprof.watch.wrappers import unwrap

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")
_NO_COUNTERS = (None, None, None, None)
# Roles of modules at whose begin and end resident memory is read; on a GPU, a read would wait for the GPU's work.
_SAMPLED_ROLES = (ModuleRole.LAYER, ModuleRole.HEAD)


class MeasuredDevice(Watch):
    """Context manager: record a workload's memory use on a real device, without any torch dispatch mode.

    Args:
        name: "cpu" or "cuda": the device of the workload's tensors.
        nvml_use: NVML's view of GPU memory outside torch's allocator; None: NVML is not queried.
        detail: whether to record stacks, so that allocations have source lines. Steps take longer then.
    """

    def __init__(self, name: str, nvml_use: NvmlUse | None = None, *, detail: bool = False) -> None:
        super().__init__()
        self.name = name
        self._with_stack = detail
        self._nvml_use = nvml_use
        self._marks = Marks(self._read_cuda if name == "cuda" else lambda: (*_NO_COUNTERS, resident_bytes()))
        self._sources: dict[str, int] = {}
        self._module_sources: list[int] = []
        self._profiler: Any = None
        # Parent of this thread's events in the profiler's tree, which omits GPU allocations without a parent.
        self._run_range = torch.profiler.record_function("memprof: the run")
        self._phase = Phase(PhaseKind.OTHER, 0, 0)
        self._peaks = SharedPeaks()
        self._gpu = 0  # the GPU that was current when the run began
        self._initial_blocks: dict[int, int] = {}  # allocated on the GPU at the begin: requested bytes by address
        self._initial_bytes = 0  # requested bytes at the begin, by torch's counter
        self._cublas: CublasWorkspace | None = None
        self._counter_samples: list[CounterSample] = []
        self.records_history = name == "cuda"
        self.snapshot: dict[str, Any] | None = None  # of torch's allocator, with its history; after a run on CUDA
        # Reason for no or an incomplete measurement: CUDA's error when its counters were read, which is
        # often the error of an earlier kernel of the program; or tensors on another GPU.
        self.error: Exception | None = None
        self.trace = Trace(source="measured", modules=self.modules.table, device=CPU if name == "cpu" else GPU)

    def __enter__(self) -> MeasuredDevice:
        check_required_names()
        try:
            self._install()
        except BaseException:
            self._stop_watching()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Remove all patches and hooks, even after a GPU error. Raises nothing itself: errors are in `error`."""
        profile, history = Profile(), None
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._stop_watching)
            self._marks.read_counters()
            if self._nvml_use is not None:  # before the run's memory is freed
                with self._record_errors():
                    self.trace.facts = Facts(nvml=self._nvml_use.facts())
            end_ns = time.time_ns()
            with self._record_errors():
                if self.records_history:
                    self.snapshot = private_cuda.snapshot()
            with self._record_errors():
                results = self._stop()
                if results is not None:
                    profile = read_events(results.experimental_event_tree(), end_ns)
        if self.snapshot is not None:
            history = self._read_history(profile, self.snapshot)
        # Modules that were never called have no source.
        self._module_sources += [NONE] * (len(self.modules.table) - len(self._module_sources))
        self.trace.sources = list(self._sources)
        allocations = collect_allocations(profile, history, self._marks.freed_storages)
        merge(self.trace, self._marks, allocations, self._module_sources, self._cublas)
        self._write_facts(self.trace)

    @contextlib.contextmanager
    def _record_errors(self) -> Iterator[None]:
        """Context manager: store a RuntimeError in `error` instead of raising it, so the program's own is raised."""
        try:
            yield
        except RuntimeError as error:
            self.error = self.error or error.with_traceback(None)

    def _install(self) -> None:
        if autograd.profiler_enabled():
            raise _make_profiler_error("memprof was started inside another profiler")
        self._watch_program()
        self.modules.on_enter_or_exit = self._on_module_event
        if self.records_history:
            cuda.check_allocator()
            torch.cuda.init()
            self._gpu = torch.cuda.current_device()
            self._cublas = cuda.get_cublas_workspace(self._gpu)
            if self._nvml_use is not None:
                self._stack.enter_context(self._nvml_use)
            self._patches.apply_all(self._peaks.patches())
            self._begin_history()
            self._peaks.take_peak(self._gpu)
        profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=self._with_stack
        )
        with quiet_profiler():
            profiler.__enter__()
        self._profiler = profiler
        self._run_range.__enter__()
        self._stack.callback(self._stop)
        self._patches.apply_all(_refuse_other_profilers())
        self._marks.begin_phase(self._phase)

    def _stop(self) -> Any:
        """Stop the profiler; return its results, or None if it is not running."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        self._run_range.__exit__(None, None, None)
        with quiet_profiler():
            profiler.__exit__(None, None, None)
        return profiler.profiler.kineto_results

    def _begin_history(self) -> None:
        self._initial_blocks = get_live_blocks(private_cuda.snapshot(), self._gpu)
        self._initial_bytes = self._peaks.requested_bytes(self._gpu)
        record = private_cuda.record_memory_history.get()
        self._stack.callback(record, enabled=None)
        self._patches.apply_all(cuda.keep_recording_history(record))
        # Without stacks, which cost time; "python": others load a library for those of C++ all the same.
        record(enabled="all", context=None, stacks="python", max_entries=cuda.MAX_ENTRIES)

    def _read_history(self, profile: Profile, snapshot: dict[str, Any]) -> History:
        """Return the allocator's history in `snapshot`; set `error` if it is incomplete, or on another GPU."""
        device = f"cuda:{self._gpu}"
        traces = enumerate(snapshot["device_traces"])
        allocating_gpus = [
            index for index, entries in traces if any(entry["action"] == Action.ALLOC for entry in entries)
        ]
        other_gpus = [index for index in allocating_gpus if index != self._gpu]
        if other_gpus:
            names = " and ".join(f"cuda:{index}" for index in other_gpus)
            self.error = self.error or MemprofError(
                f"the program has tensors on {names}, and one GPU is measured, {device}", value=f"cuda:{other_gpus[0]}",
                hint=f"CUDA_VISIBLE_DEVICES={other_gpus[0]} shows a program that GPU alone, as cuda:0",
            )  # fmt: skip
        history = read_history(snapshot, self._gpu, [entry for entry in profile.memory if entry.device == device])
        if self.error is None:
            gap = find_largest_gap(history, self._counter_samples, self._initial_bytes)
            missing_bytes = history.count_missing_bytes(get_live_blocks(snapshot, self._gpu), self._initial_blocks)
            self.error = cuda.find_incompleteness(history, gap, missing_bytes)
        return history

    @property
    def current_phase(self) -> Phase:
        """The current phase."""
        return self._phase

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase; later events belong to it."""
        self._phase = Phase(kind, step, micro_batch)
        self._marks.begin_phase(self._phase)

    num_events = None  # counted by torch's profiler, after the run
    room_bytes = None  # other processes may use the GPU too

    @property
    def held_bytes(self) -> int:
        """Bytes allocated on the GPU now; 0 on the CPU, where torch has no counter."""
        return torch.cuda.memory_allocated(self._gpu) if self.name == "cuda" else 0

    def set_owner(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Record the role and name of `tensor`, or of its shard on this rank, as in `owner`."""
        tensor = unwrap(tensor)
        if tensor.is_meta or not tensor.numel():
            return
        # torch keeps an optimizer's step counts in host memory, whatever the device of the parameters.
        on_host = owner.role is Role.OPTIMIZER_STATE and tensor.dim() == 0 and not tensor.is_cuda
        dtype = str(tensor.dtype).removeprefix("torch.")
        storage = tensor.untyped_storage()
        if storage.device.type == HOST:
            self._marks.watch_storage(storage)
        mark = OwnerMark(time.time_ns(), storage.data_ptr(), owner, tuple(tensor.shape), dtype, on_host)
        self._marks.owner_marks.append(mark)

    def mark_input(self, tensor: torch.Tensor) -> None:
        """Record that `tensor` is an input of a model, unless a module allocated it (merge.py checks that)."""
        if tensor.layout is torch.strided and not autograd.is_functorch_wrapped_tensor(tensor):
            self.set_owner(tensor, Owner(Role.INPUT, ""))

    def _on_module_event(self, kind: EventKind, module: int) -> None:
        if self.name == "cpu" and self.modules.table[module].role in _SAMPLED_ROLES:
            self._marks.read_counters()
        self._marks.marks.append(Mark(time.time_ns(), kind, module))

    def wrap_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `original` that also records the source line of each module's `forward`."""
        wrapped = super().wrap_module_call(original)
        table, module_sources, record_sources = self.modules.table, self._module_sources, self._record_sources

        # The profiler reads a module's name from the local `self` of this function.
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(module_sources) < len(table) or not module_sources:
                record_sources()
            return wrapped(self, *args, **kwargs)

        return __call__

    def _record_sources(self) -> None:
        sources, module_sources = self._sources, self._module_sources
        module_by_index = {index: module for module, index in self.modules.iterate_live_modules()}
        for index in range(len(module_sources), len(self.modules.table)):
            module = module_by_index.get(index)
            code = getattr(getattr(type(module), "forward", None), "__code__", None)
            line = f"{code.co_filename}:{code.co_firstlineno} forward" if code is not None else ""
            module_sources.append(sources.setdefault(line, len(sources)) if line else NONE)

    def _read_cuda(self) -> Counters:
        gpu, used_bytes = self._gpu, None
        if self.error is None:  # CUDA repeats an error at every call
            with self._record_errors():
                if not torch.cuda.is_current_stream_capturing():  # CUDA graph capture forbids synchronization
                    torch.cuda.synchronize(gpu)
                used_bytes = None if self._nvml_use is None else self._nvml_use.used_bytes()
                begin_ns = time.time_ns()
                requested_bytes = self._peaks.requested_bytes(gpu)
                self._counter_samples.append(CounterSample(begin_ns, time.time_ns(), requested_bytes))
                allocated, reserved = torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)
                return allocated, self._peaks.take_peak(gpu), reserved, used_bytes, resident_bytes()
        return *_NO_COUNTERS, resident_bytes()


def _refuse_other_profilers() -> Iterator[Patch]:
    """Yield patches that raise MemprofError if the program starts torch's profiler, which would end memprof's."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _make_profiler_error("the program starts torch's profiler itself")

    for name in ("_prepare_profiler", "_enable_profiler"):
        yield autograd_profiler, name, refuse


def _make_profiler_error(problem: str) -> MemprofError:
    reason = "one profiler at a time can record, and a measured run is recorded by it"
    return MemprofError(problem, value=reason, hint="take one of the two out, or simulate: leave out --device")


def resident_bytes() -> int | None:
    """Return the resident bytes of this process; None where the system does not report them."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None
