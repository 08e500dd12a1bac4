"""`MeasuredDevice`: runs a workload on the CPU or on a CUDA card for real, and records what it does to memory."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity

from memprof.measured import cuda
from memprof.measured.events import Recorded, read_events
from memprof.measured.marks import Marks
from memprof.measured.merge import merge
from memprof.measured.outside import Outside
from memprof.measured.quiet import quiet_profiler
from memprof.trace.events import CPU, GPU, NONE, EventKind, ModuleRole, Owner, Phase, PhaseKind, Role, Trace
from memprof.trace.facts import Facts
from memprof.watch.imports import watch_imports
from memprof.watch.modules import ModuleTracker
from memprof.watch.patches import Patches
from memprof.watch.phases import Phases

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")
_READ_AT = (ModuleRole.LAYER, ModuleRole.HEAD)
"""Modules at whose beginning and end resident memory is read; on a card, reading would wait for its work."""


class MeasuredDevice:
    """A context manager in which what a workload does on a device is recorded, without any mode.

    Args:
        name: "cpu" or "cuda": where the workload puts its tensors.
        outside: what is on the card beside torch's own memory; None: nobody is asked.
        detail: record stacks, so that an allocation has the line that made it. A step takes longer then.
    """

    def __init__(self, name: str, outside: Outside | None = None, *, detail: bool = False) -> None:
        self.name = name
        self._detail = detail
        self._outside = outside
        self.modules = ModuleTracker()
        self._marks = Marks(self._read_cuda if name == "cuda" else self._read_cpu)
        self._patches = Patches()
        self._stack = contextlib.ExitStack()
        self._assumptions: dict[str, None] = {}
        self._sources: dict[str, int] = {}
        self._module_sources: list[int] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._profiler: Any = None
        self._phase = Phase(PhaseKind.OTHER, 0, 0)
        self.phases = Phases(self._begin_phase, lambda: self._phase)
        """Those of a program that does not name its own."""
        self.records_history = name == "cuda"
        self.snapshot: dict[str, Any] | None = None
        """Of torch's allocator, with its history; after a run on CUDA."""
        self.failed_phase: Phase | None = None
        """In which an exception was raised."""
        self.trace = Trace(source="measured", modules=self.modules.table, device=CPU if name == "cpu" else GPU)

    # -- in and out -------------------------------------------------------------------------------------------------

    def __enter__(self) -> MeasuredDevice:
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._marks.reading()
        if self._outside is not None:  # while the process still holds what the run took
            self.trace.facts = Facts(nvml=self._outside.facts())
        end_ns = time.time_ns()
        recorded = self._stop()
        self._remove()
        never_entered = len(self.modules.table) - len(self._module_sources)
        self._module_sources += [NONE] * never_entered
        trace = self.trace
        trace.sources = list(self._sources)
        merge(trace, self._marks, recorded(end_ns), self._module_sources)
        trace.assumptions = list(self._assumptions)
        trace.trains = self.phases.trains

    def _install(self) -> None:
        activities = [ProfilerActivity.CPU]
        for owner, name, value in self.phases.patches():
            self._patches.set(owner, name, value)
        self._stack.enter_context(watch_imports(self._libraries()))
        self.modules.on_outermost = lambda module, index, args, kwargs: self.phases.forward(module)
        self._patches.set(nn.Module, "__call__", self._noting_sources(self.modules.wrap_call(nn.Module.__call__)))
        self.modules.listener = self._module_event
        self.modules.on_root = self.adopt
        self._watch_backward()
        for handle in (register_optimizer_step_post_hook(self._after_step), *self.phases.hooks()):
            self._stack.callback(handle.remove)
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

    def _remove(self) -> None:
        self._patches.undo()
        self._stack.close()
        self._roots.clear()

    # -- what a workload tells --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """What runs inside is this phase."""
        before = self._phase
        recognised, self.phases.recognises = self.phases.recognises, False
        self._begin_phase(kind, step, micro_batch)
        try:
            yield
        except BaseException:
            if self.failed_phase is None:
                self.failed_phase = self._phase
            raise
        finally:
            self.phases.recognises = recognised
            self._begin_phase(*before)

    @property
    def held_bytes(self) -> int:
        """Bytes on the card now; 0 on the CPU, where torch does not say."""
        return torch.cuda.memory_allocated() if self.name == "cuda" else 0

    def _begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        self._phase = Phase(kind, step, micro_batch)
        self._marks.begin_phase(self._phase)

    def _libraries(self) -> dict[str, Callable[[], None]]:
        def replace(patches: Callable[[], Iterator[tuple[Any, str, Any]]]) -> Callable[[], None]:
            def act() -> None:
                for owner, name, value in patches():
                    self._patches.set(owner, name, value)

            return act

        return {name: replace(patches) for name, patches in self.phases.of_imports().items()}

    def adopt(self, root: nn.Module) -> None:
        """`root` is a model of this run."""
        if not any(known() is root for known in self._roots):
            self._roots.append(weakref.ref(root))
        self.modules.add_root(root)
        self._name_parameters()

    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """`tensor` has this role."""
        self._own(tensor, owner)

    def assume(self, sentence: str) -> None:
        """The run rests on this; said once."""
        self._assumptions.setdefault(sentence)

    def _module_event(self, kind: EventKind, module: int) -> None:
        if self.name == "cpu" and self.modules.table[module].role in _READ_AT:
            self._marks.reading()
        self._marks.module(kind, module)

    # -- what is watched --------------------------------------------------------------------------------------------

    def _noting_sources(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """Where each module's forward is defined: what takes the place of the line that allocated."""
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

    def _watch_backward(self) -> None:
        original = torch.autograd.graph._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            nested = torch._C._current_graph_task_id() != -1
            if not nested:
                self.phases.backward()
            try:
                return original(*args, **kwargs)
            except BaseException:
                if self.failed_phase is None:
                    self.failed_phase = self._phase
                raise
            finally:
                if not nested:
                    self._name_parameters()
                    self.phases.after_backward()

        self._patches.set(torch.autograd, "_engine_run_backward", run_backward)

    def _name_parameters(self) -> None:
        for root in [root for known in self._roots if (root := known()) is not None]:
            for name, parameter in root.named_parameters():
                self._own(parameter, Owner(Role.PARAMETER, name))
                if parameter.grad is not None:
                    self._own(parameter.grad, Owner(Role.GRADIENT, name))
            for name, buffer in root.named_buffers():
                self._own(buffer, Owner(Role.BUFFER, name))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._own(value, Owner(Role.OPTIMIZER_STATE, str(key)))

    def _own(self, tensor: torch.Tensor, owner: Owner) -> None:
        if tensor.is_meta or not tensor.numel():
            return
        # torch keeps an optimizer's step counts in host memory, whatever the device of the parameters.
        on_host = owner.role is Role.OPTIMIZER_STATE and tensor.dim() == 0 and not tensor.is_cuda
        dtype = str(tensor.dtype).removeprefix("torch.")
        address = tensor.untyped_storage().data_ptr()
        self._marks.claim(address, owner, tuple(tensor.shape), dtype, on_host=on_host)

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
