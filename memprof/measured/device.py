"""`MeasuredDevice`: runs a workload on the CPU or on a CUDA GPU for real, and records what it does to memory."""

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

from memprof.device.cublas import CublasWorkspace
from memprof.errors import MemprofError
from memprof.measured import cuda
from memprof.measured.cuda import NvmlUse, SharedPeaks
from memprof.measured.history import CounterSample, History, largest_difference, live_blocks, read_history
from memprof.measured.marks import Claim, Counters, Mark, Marks
from memprof.measured.merge import collect_allocations, merge
from memprof.measured.operators import Profile, quiet_profiler, read_events
from memprof.patching import Patch
from memprof.torch_private import autograd
from memprof.torch_private import cuda as private_cuda
from memprof.torch_private.check import refuse_missing
from memprof.trace.events import CPU, GPU, HOST, NONE, EventKind, ModuleRole, Owner, Phase, PhaseKind, Role, Trace
from memprof.trace.facts import Facts
from memprof.trace.snapshot import Action
from memprof.watch.watch import Watch
from memprof.watch.wrappers import unwrapped

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")
_NO_COUNTERS = (None, None, None, None)
# Modules at whose beginning and end resident memory is read; on a GPU, reading would wait for its work.
_READ_AT = (ModuleRole.LAYER, ModuleRole.HEAD)


class MeasuredDevice(Watch):
    """A context manager in which what a workload does on a device is recorded, without any mode.

    Args:
        name: "cpu" or "cuda": where the workload puts its tensors.
        outside: what is on the GPU beside torch's own memory; None: nobody is asked.
        detail: record stacks, so that an allocation has the line that made it. A step takes longer then.
    """

    def __init__(self, name: str, outside: NvmlUse | None = None, *, detail: bool = False) -> None:
        super().__init__()
        self.name = name
        self._detail = detail
        self._outside = outside
        self._marks = Marks(self._read_cuda if name == "cuda" else lambda: (*_NO_COUNTERS, resident_bytes()))
        self._sources: dict[str, int] = {}
        self._module_sources: list[int] = []
        self._profiler: Any = None
        # What this thread does has a parent in the profiler's tree; a GPU's allocations without one are not in it.
        self._whole_run = torch.profiler.record_function("memprof: the run")
        self._phase = Phase(PhaseKind.OTHER, 0, 0)
        self._peaks = SharedPeaks()
        self._gpu = 0  # the GPU that was current when the run began
        self._before: dict[int, int] = {}  # blocks that were allocated on it then: bytes requested, by address
        self._before_bytes = 0  # the same by torch's counter
        self._cublas: CublasWorkspace | None = None
        self._readings: list[CounterSample] = []
        self.records_history = name == "cuda"
        self.snapshot: dict[str, Any] | None = None  # of torch's allocator, with its history; after a run on CUDA
        # Why there is no measurement, or only the run's beginning: what CUDA said when its counters were read, which is
        # often what a kernel of the program did before; or tensors on another GPU.
        self.error: Exception | None = None
        self.trace = Trace(source="measured", modules=self.modules.table, device=CPU if name == "cpu" else GPU)

    def __enter__(self) -> MeasuredDevice:
        refuse_missing()
        try:
            self._install()
        except BaseException:
            self._unwatch()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Put everything back, whatever the GPU says, and raise nothing of its own: `error` has it."""
        profile, history = Profile(), None
        with contextlib.ExitStack() as always:
            always.callback(self._unwatch)
            self._marks.reading()
            if self._outside is not None:  # while the process still holds what the run took
                with self._noting_errors():
                    self.trace.facts = Facts(nvml=self._outside.facts())
            end_ns = time.time_ns()
            with self._noting_errors():
                if self.records_history:
                    self.snapshot = private_cuda.snapshot()
            with self._noting_errors():
                results = self._stop()
                if results is not None:
                    profile = read_events(results.experimental_event_tree(), end_ns)
        if self.snapshot is not None:
            history = self._history(profile, self.snapshot)
        self._module_sources += [NONE] * (len(self.modules.table) - len(self._module_sources))  # those never entered
        self.trace.sources = list(self._sources)
        recorded = collect_allocations(profile, history, self._marks.gone)
        merge(self.trace, self._marks, recorded, self._module_sources, self._cublas)
        self._tell(self.trace)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """An error of CUDA's inside is kept in `error` and not raised: it must not stand in for the program's own."""
        try:
            yield
        except RuntimeError as error:
            self.error = self.error or error.with_traceback(None)

    def _install(self) -> None:
        if autograd.profiler_enabled():
            raise _one_profiler("memprof was started inside another profiler")
        self._watch_program()
        self.modules.listener = self._module_event
        if self.records_history:
            cuda.check_allocator()
            torch.cuda.init()
            self._gpu = torch.cuda.current_device()
            self._cublas = cuda.cublas_workspace(self._gpu)
            if self._outside is not None:
                self._stack.enter_context(self._outside)
            self._patches.set_all(self._peaks.patches())
            self._begin_history()
            self._peaks.take(self._gpu)
        profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=self._detail
        )
        with quiet_profiler():
            profiler.__enter__()
        self._profiler = profiler
        self._whole_run.__enter__()
        self._stack.callback(self._stop)
        self._patches.set_all(_other_profilers())
        self._marks.begin_phase(self._phase)

    def _stop(self) -> Any:
        """Stop the profiler; its results, or None if it was stopped before or never began."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        self._whole_run.__exit__(None, None, None)
        with quiet_profiler():
            profiler.__exit__(None, None, None)
        return profiler.profiler.kineto_results

    def _begin_history(self) -> None:
        self._before = live_blocks(private_cuda.snapshot(), self._gpu)
        self._before_bytes = self._peaks.requested_bytes(self._gpu)
        record = private_cuda.record_memory_history.get()
        self._stack.callback(record, enabled=None)
        self._patches.set_all(cuda.keep_recording_history(record))
        # Without stacks, which cost time; "python": others load a library for those of C++ all the same.
        record(enabled="all", context=None, stacks="python", max_entries=cuda.MAX_ENTRIES)

    def _history(self, profile: Profile, snapshot: dict[str, Any]) -> History:
        """Return what the allocator of this GPU recorded; `error` says what is not in it."""
        here = f"cuda:{self._gpu}"
        traces = enumerate(snapshot["device_traces"])
        took = [number for number, entries in traces if any(one["action"] == Action.ALLOC for one in entries)]
        others = [number for number in took if number != self._gpu]
        if others:
            names = " and ".join(f"cuda:{number}" for number in others)
            self.error = self.error or MemprofError(
                f"the program has tensors on {names}, and one GPU is measured, {here}", value=f"cuda:{others[0]}",
                hint=f"CUDA_VISIBLE_DEVICES={others[0]} shows a program that GPU alone, as cuda:0",
            )  # fmt: skip
        history = read_history(snapshot, self._gpu, [one for one in profile.memory if one.device == here])
        if self.error is None:
            difference = largest_difference(history, self._readings, self._before_bytes)
            missing = history.missing(live_blocks(snapshot, self._gpu), self._before)
            self.error = cuda.why_incomplete(history, difference, missing)
        return history

    @property
    def current_phase(self) -> Phase:
        """The phase that is running."""
        return self._phase

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase, to which what happens from here on belongs."""
        self._phase = Phase(kind, step, micro_batch)
        self._marks.begin_phase(self._phase)

    num_events = None  # not counted before the run has ended: torch's profiler has them

    @property
    def held_bytes(self) -> int:
        """Bytes on the GPU now; 0 on the CPU, where torch does not say."""
        return torch.cuda.memory_allocated(self._gpu) if self.name == "cuda" else 0

    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """`tensor` has this role; of one that is spread over ranks, this rank's part."""
        tensor = unwrapped(tensor)
        if tensor.is_meta or not tensor.numel():
            return
        # torch keeps an optimizer's step counts in host memory, whatever the device of the parameters.
        on_host = owner.role is Role.OPTIMIZER_STATE and tensor.dim() == 0 and not tensor.is_cuda
        dtype = str(tensor.dtype).removeprefix("torch.")
        storage = tensor.untyped_storage()
        if storage.device.type == HOST:
            self._marks.watch(storage)
        claim = Claim(time.time_ns(), storage.data_ptr(), owner, tuple(tensor.shape), dtype, on_host)
        self._marks.claims.append(claim)

    def claim_input(self, tensor: torch.Tensor) -> None:
        """`tensor` was given to a model; merge.py sees whether a module made it."""
        if tensor.layout is torch.strided and not autograd.is_functorch_wrapped_tensor(tensor):
            self.claim(tensor, Owner(Role.INPUT, ""))

    def _module_event(self, kind: EventKind, module: int) -> None:
        if self.name == "cpu" and self.modules.table[module].role in _READ_AT:
            self._marks.reading()
        self._marks.marks.append(Mark(time.time_ns(), kind, module))

    def wrap_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Notes where each module's forward is defined as well: what takes the place of the line that allocated."""
        wrapped = super().wrap_module_call(original)
        table, module_sources, note_sources = self.modules.table, self._module_sources, self._note_sources

        # The profiler takes a module's name from the local `self` of this function.
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(module_sources) < len(table) or not module_sources:
                note_sources()
            return wrapped(self, *args, **kwargs)

        return __call__

    def _note_sources(self) -> None:
        sources, module_sources = self._sources, self._module_sources
        known = {index: module for module, index in self.modules.known()}
        for index in range(len(module_sources), len(self.modules.table)):
            module = known.get(index)
            code = getattr(getattr(type(module), "forward", None), "__code__", None)
            line = f"{code.co_filename}:{code.co_firstlineno} forward" if code is not None else ""
            module_sources.append(sources.setdefault(line, len(sources)) if line else NONE)

    def _read_cuda(self) -> Counters:
        gpu, used = self._gpu, None
        if self.error is None:  # CUDA repeats an error at every call
            with self._noting_errors():
                if not torch.cuda.is_current_stream_capturing():  # a graph cannot be made of what waits for the GPU
                    torch.cuda.synchronize(gpu)
                used = None if self._outside is None else self._outside.used_bytes()
                begin_ns = time.time_ns()
                requested = self._peaks.requested_bytes(gpu)
                self._readings.append(CounterSample(begin_ns, time.time_ns(), requested))
                allocated, reserved = torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)
                return allocated, self._peaks.take(gpu), reserved, used, resident_bytes()
        return *_NO_COUNTERS, resident_bytes()


def _other_profilers() -> Iterator[Patch]:
    """Refuse what begins a profiler of the program's own: it would end memprof's, and all that was seen with it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _one_profiler("the program starts torch's profiler itself")

    for name in ("_prepare_profiler", "_enable_profiler"):
        yield autograd_profiler, name, refuse


def _one_profiler(what: str) -> MemprofError:
    why = "one profiler at a time can record, and a measured run is recorded by it"
    return MemprofError(what, value=why, hint="take one of the two out, or simulate: leave out --device")


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None
