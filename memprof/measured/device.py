"""`MeasuredDevice`: runs a workload on the CPU or on a CUDA card for real, and records what it does to memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from memprof.measured import cuda
from memprof.measured.events import Recorded, read_events
from memprof.measured.marks import Marks
from memprof.measured.merge import merge
from memprof.measured.outside import Outside
from memprof.measured.quiet import quiet_profiler
from memprof.trace.events import CPU, GPU, NONE, EventKind, ModuleRole, Owner, Phase, PhaseKind, Role, Trace
from memprof.trace.facts import Facts
from memprof.watch.watch import Watch

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")
_READ_AT = (ModuleRole.LAYER, ModuleRole.HEAD)
"""Modules at whose beginning and end resident memory is read; on a card, reading would wait for its work."""


class MeasuredDevice(Watch):
    """A context manager in which what a workload does on a device is recorded, without any mode.

    Args:
        name: "cpu" or "cuda": where the workload puts its tensors.
        outside: what is on the card beside torch's own memory; None: nobody is asked.
        detail: record stacks, so that an allocation has the line that made it. A step takes longer then.
    """

    def __init__(self, name: str, outside: Outside | None = None, *, detail: bool = False) -> None:
        super().__init__()
        self.name = name
        self._detail = detail
        self._outside = outside
        self._marks = Marks(self._read_cuda if name == "cuda" else self._read_cpu)
        self._sources: dict[str, int] = {}
        self._module_sources: list[int] = []
        self._profiler: Any = None
        self._phase = Phase(PhaseKind.OTHER, 0, 0)
        self.records_history = name == "cuda"
        self.snapshot: dict[str, Any] | None = None
        """Of torch's allocator, with its history; after a run on CUDA."""
        self.trace = Trace(source="measured", modules=self.modules.table, device=CPU if name == "cpu" else GPU)

    # -- in and out -------------------------------------------------------------------------------------------------

    def __enter__(self) -> MeasuredDevice:
        try:
            self._install()
        except BaseException:
            self._unwatch()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._marks.reading()
        if self._outside is not None:  # while the process still holds what the run took
            self.trace.facts = Facts(nvml=self._outside.facts())
        end_ns = time.time_ns()
        recorded = self._stop()
        self._unwatch()
        never_entered = len(self.modules.table) - len(self._module_sources)
        self._module_sources += [NONE] * never_entered
        trace = self.trace
        trace.sources = list(self._sources)
        merge(trace, self._marks, recorded(end_ns), self._module_sources)
        self._tell(trace)

    def _install(self) -> None:
        activities = [ProfilerActivity.CPU]
        self._watch_program()
        self.modules.listener = self._module_event
        if self.records_history:
            torch.cuda.init()
            if self._outside is not None:
                self._stack.enter_context(self._outside)
            torch.cuda.reset_peak_memory_stats()
            cuda.start_history()
        self._profiler = torch.profiler.profile(
            activities=activities, profile_memory=True, record_shapes=True, with_stack=self._detail
        )
        with quiet_profiler():
            self._profiler.__enter__()
        self._marks.begin_phase(self._phase)

    def _stop(self) -> Callable[[int], Recorded]:
        if self._profiler is None:
            return lambda end_ns: Recorded()
        profiler, self._profiler = self._profiler, None
        with quiet_profiler():
            profiler.__exit__(None, None, None)
        results = profiler.profiler.kineto_results
        if self.records_history:
            self.snapshot = cuda.stop_history()

        def read(end_ns: int) -> Recorded:
            recorded = read_events(results.experimental_event_tree(), end_ns)
            if self.snapshot is not None:
                why = cuda.take_requested_sizes(recorded, self.snapshot, torch.cuda.current_device())
                if why is not None:
                    self.assume(f"Requested sizes are not known: {why}.")
            return recorded

        return read

    # -- what a workload tells --------------------------------------------------------------------------------------

    @property
    def current_phase(self) -> Phase:
        """The phase that is running."""
        return self._phase

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """From here on, what happens belongs to this phase."""
        self._phase = Phase(kind, step, micro_batch)
        self._marks.begin_phase(self._phase)

    @property
    def held_bytes(self) -> int:
        """Bytes on the card now; 0 on the CPU, where torch does not say."""
        return torch.cuda.memory_allocated() if self.name == "cuda" else 0

    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """`tensor` has this role."""
        if tensor.is_meta or not tensor.numel():
            return
        # torch keeps an optimizer's step counts in host memory, whatever the device of the parameters.
        on_host = owner.role is Role.OPTIMIZER_STATE and tensor.dim() == 0 and not tensor.is_cuda
        dtype = str(tensor.dtype).removeprefix("torch.")
        address = tensor.untyped_storage().data_ptr()
        self._marks.claim(address, owner, tuple(tensor.shape), dtype, on_host=on_host)

    def _module_event(self, kind: EventKind, module: int) -> None:
        if self.name == "cpu" and self.modules.table[module].role in _READ_AT:
            self._marks.reading()
        self._marks.module(kind, module)

    # -- what is watched --------------------------------------------------------------------------------------------

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
            if code is None:
                module_sources.append(NONE)
                continue
            line = f"{code.co_filename}:{code.co_firstlineno} forward"
            module_sources.append(sources.setdefault(line, len(sources)))

    # -- counters ---------------------------------------------------------------------------------------------------

    def _read_cpu(self) -> tuple[int | None, int | None, int | None, int | None, int | None]:
        return None, None, None, None, resident_bytes()

    def _read_cuda(self) -> tuple[int | None, int | None, int | None, int | None, int | None]:
        torch.cuda.synchronize()
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        used = None if self._outside is None else self._outside.used_bytes()
        return allocated, peak, reserved, used, resident_bytes()


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None
