"""`VirtualGpu`: the context manager of a run on the virtual GPU; it installs and removes modes and patches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.patching import Extension, find_extensions
from memprof.serving.budget import EngineBudget
from memprof.trace.events import NONE, Failure, Owner, Phase, PhaseKind, Role, Trace
from memprof.virtual.install_context import GpuOptions, InstallContext
from memprof.watch import sharding
from memprof.watch.callers import CallerRecorder
from memprof.watch.failure import (
    describe_failure,
    has_last_allocation_failed,
    is_caused_by_oom,
    is_torchscript_error,
    make_refused_failure,
)
from memprof.watch.kept_memory import KeptMemoryWatch
from memprof.watch.recorder import Recorder
from memprof.watch.source_lines import is_display_statement
from memprof.watch.updates import UpdateDetector
from memprof.watch.watch import Watch
from memprof.watch.wrappers import get_quantized_parts

# Packages with the extensions of every virtual GPU; "cuda_api", "mps_api" or "xpu_api" is another, by its device type.
_FOLDERS = tuple(f"memprof.virtual.{name}" for name in ("integrations", "distributed", "compiled"))
_UNKNOWN_KERNELS = (
    "Operators of {0} make the tensors that CUDA's make. What its kernels take beside tensors (scratch memory, "
    "workspaces, compiled graphs), and what its driver takes, is not known and not counted."
)
_active: VirtualGpu | None = None


class VirtualGpu(Watch):
    """Context manager: `cuda:0` (`mps:0`, `xpu:0`) is a virtual GPU, and every allocation on it is recorded.

    Args:
        gpu: the model of the simulated GPU.
        extensions: further extensions, besides those in the folders of this package.
        options: fields of GpuOptions.

    Raises:
        MemprofError: a virtual GPU is already active.
    """

    advice_if_active = "leave it before entering another"  # advice for a program that enters another virtual GPU

    def __init__(self, gpu: Gpu, *, extensions: Sequence[Extension] = (), **options: Any) -> None:
        super().__init__()
        self.gpu = gpu
        self.name = gpu.device_type  # device of the program's tensors, as the program names it
        gpu_options = GpuOptions(**options)
        if self.name != "cuda":  # whose kernels are not known: what they take beside tensors is CUDA's
            gpu_options = dataclasses.replace(gpu_options, tensors_only=True, compiles=False)
            self.assume(_UNKNOWN_KERNELS.format(self.name.upper()))
        self.recorder = Recorder(self.modules)
        self.recorder.storages.records_tensorless_memory = not gpu_options.tensors_only
        if gpu_options.records_callers:
            self.recorder.storages.record_callers = CallerRecorder(
                self.recorder.trace, self.recorder.attribution
            ).record
        self._unknown_read: tuple[int, str] | None = None
        # Source lines that have read an unknown value -> whether the line only prints the value.
        self._is_display_line: dict[int, bool] = {}
        self._kept_memory = KeptMemoryWatch(self.recorder, self.phases)
        self._extensions = [
            *(extension_class() for extension_class in find_extensions(f"memprof.virtual.{self.name}_api", *_FOLDERS)),
            *extensions,
        ]
        self._unsupported: Failure | None = None
        self._num_described_models = 0  # number of models whose distribution over ranks is noted
        self._context = InstallContext(
            gpu,
            gpu_options,
            self.recorder,
            self._patches,
            self.assume,
            environment={name: value for extension in extensions for name, value in extension.environment.items()},
            on_unsupported=self._record_unsupported,
            leave_in_child=self._leave_in_child,
        )
        self.recorder.trace.device = self._context.gpus.first
        if gpu_options.raises_oom:
            self.recorder.storages.find_oom_message = self._oom_message
            self.recorder.storages.on_out_of_memory = self._record_out_of_memory
        self._context.values.policy.on_unknown_read = self._record_unknown_read
        self.dispatch_mode = self._context.dispatch_mode
        self._updates = self.dispatch_mode.updates = UpdateDetector(self.recorder, self.phases, self._name_parameters)
        self._updates.on_step = lambda: self._kept_memory.growth.record_phase_begin(
            PhaseKind.OPTIMIZER_STEP, in_step=True
        )
        untrained = self._kept_memory.untrained
        self.on_backward_begin, self.on_backward_end = untrained.record_backward_begin, untrained.record_backward_end
        self.recorder.storages.on_free = self._context.values.store.drop
        self.modules.on_outermost_return = self._outermost_return

    @property
    def on_engine_start(self) -> Callable[[EngineBudget], None]:
        """Return the function that is called with the budget of an inference engine that has started or refused to."""
        return self._context.on_engine_start

    @on_engine_start.setter
    def on_engine_start(self, function: Callable[[EngineBudget], None]) -> None:
        self._context.on_engine_start = function

    @property
    def trace(self) -> Trace:
        """Return the trace of the recorded events."""
        trace = self.recorder.trace
        trace.work = self.dispatch_mode.meter.finish()
        trace.last_uses = self.recorder.storages.list_last_uses()
        self._write_facts(trace)
        return trace

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are live on the GPU now."""
        return self.recorder.storages.live_bytes

    @property
    def room_bytes(self) -> int:
        """Return the bytes that the GPU has beside the peak of live bytes so far and CUDA's context."""
        return self.gpu.total_bytes - self.gpu.context_bytes - self.recorder.storages.peak_bytes

    @property
    def num_events(self) -> int:
        """Return the number of events recorded so far."""
        return len(self.recorder.trace.events)

    @property
    def unsupported(self) -> Failure | None:
        """Return the first unsupported operation of the program or its processes, even if the error was caught."""
        for problem, hint in self._context.subprocesses.read_refusals() if self._unsupported is None else ():
            self._record_unsupported(problem, hint, None)
        return self._unsupported

    # -- in and out -------------------------------------------------------------------------------------------------

    def __enter__(self) -> VirtualGpu:
        global _active
        if _active is not None:
            raise MemprofError("a virtual GPU is already active", hint=_active.advice_if_active)
        _active = self
        if self._context.gpus.has_several:
            path = "directly" if self._context.gpus.are_peers else "through buffers, as GeForce GPUs do"
            self.assume(f"The {self._context.gpus.num_gpus} GPUs are alike; what is copied between them goes {path}.")
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def _oom_message(self, device: str) -> str | None:
        message = self._context.memory.get_statistics(device).find_oom_message()
        if message is not None:
            self._set_registered_roles()
        return message

    def _record_out_of_memory(self, error: RuntimeError) -> None:
        self._kept_memory.record_out_of_memory(error, has_phases=self.phases.is_recognizing)

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self._set_registered_roles()
        self._updates.record_run_end()
        trace = self.recorder.trace
        is_out_of_memory = is_caused_by_oom(error) or (
            is_torchscript_error(error) and has_last_allocation_failed(trace)
        )
        if is_out_of_memory and trace.refused:
            # Out of memory on the GPU is the verdict of the run, and no failure.
            trace.refused.pop()
            trace.ended_out_of_memory = True
            self._record_what_was_to_come(trace, error, self.recorder.storages.get_index)
        elif (unsupported := self.unsupported) is not None:
            trace.failure = unsupported
        elif isinstance(error, (Exception, KeyboardInterrupt)) and not isinstance(error, UsageError):
            trace.failure = describe_failure(
                error,
                self.recorder,
                self.find_error_phase(error),
                self._unknown_read,
                type(self.dispatch_mode).__torch_dispatch__.__code__,
            )
        if error is None and self.phases.is_recognizing:
            self._kept_memory.record_run_end()
        self._remove()

    def _record_unknown_read(self, tensor: torch.Tensor, message: str) -> None:
        line = self.recorder.attribution.find_caller_line()
        if line not in self._is_display_line:
            self._is_display_line[line] = line != NONE and is_display_statement(self.recorder.trace.sources[line])
        if not self._is_display_line[line]:
            self._unknown_read = (line, message)

    def _record_unsupported(self, problem: str, hint: str | None, line: str | None) -> None:
        if self._unsupported is None:
            self._unsupported = make_refused_failure(problem, hint, line, self.current_phase)

    def _install(self) -> None:
        """Install the hooks on the program, then every extension, and last the function mode and the dispatch mode."""
        context = self._context
        self._watch_program()
        self._patches.set(nn.Module, "train", self._kept_memory.settings.wrap_train(nn.Module.train))
        for extension in self._extensions:
            self._patches.apply_all(extension.patches(context))
            self._stack.enter_context(extension.around(context))
        for extension in self._extensions:
            for name in extension.imports:
                self._patches.apply_on_import(name, functools.partial(extension.make_module_patches, context=context))
        self._stack.enter_context(context.function_mode)
        self._stack.enter_context(self.dispatch_mode)

    def _remove(self) -> None:
        global _active
        _active = None
        try:
            self._stop_watching()
        finally:
            self.recorder.close()

    def _leave_in_child(self) -> None:
        """Disable the virtual GPU in a process that the program has forked."""
        global _active
        _active = None
        self.recorder.stop_recording()
        for extension in self._extensions:
            extension.leave_in_child()
        self._patches.undo()

    # -- phases -----------------------------------------------------------------------------------------------------

    @property
    def current_phase(self) -> Phase:
        """Return the current phase."""
        return self.recorder.writer.phase

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase; later events belong to it."""
        self.recorder.writer.begin_phase(kind, step, micro_batch)

    def _begin_recognized_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        self._updates.record_phase_begin(kind)
        super()._begin_recognized_phase(kind, step, micro_batch)
        self._kept_memory.record_phase_begin(kind, in_step=self.phases.is_stepping)

    def _handle_outermost_call(self, module: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        super()._handle_outermost_call(module, index, args, kwargs)
        self.dispatch_mode.kv_caches.record_call(index, (*args, *kwargs.values()))
        if self._is_recognizing_calls:
            self._kept_memory.record_call(module, index)

    def mark_input(self, tensor: torch.Tensor) -> None:
        """Record that a model received `tensor` as an input."""
        if self.recorder.owners.is_allocated_outside_modules(tensor):
            self.recorder.owners.set_owner(tensor, Owner(Role.INPUT, ""))

    def _outermost_return(self, result: Any) -> None:
        """Record that the outermost call of a model returns `result`."""
        self.dispatch_mode.kv_caches.record_call_result(result)
        if self._is_recognizing_calls:
            self._kept_memory.growth.record_call_result(result)

    def set_owner(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Record the role and name of `tensor`, as in `owner`."""
        self.recorder.owners.set_owner(tensor, owner)

    def _name_parameters(self) -> None:
        super()._name_parameters()
        # Wrappers are complete only after the first backward pass.
        if self.recorder.owners.is_naming_communication and self.phases.num_backwards:
            self._note_sharding()

    def _note_sharding(self) -> None:
        """Record how the models are distributed over ranks, and which full gradients are not reduced yet."""
        models = [model for reference in self._roots if (model := reference()) is not None]
        for name, gradient in itertools.chain.from_iterable(map(sharding.iterate_unreduced_gradients, models)):
            self.set_owner(gradient, Owner(Role.GRADIENT, name))
        if len(models) != self._num_described_models:
            self._num_described_models = len(models)
            trace = self.recorder.trace
            groups = tuple(itertools.chain.from_iterable(map(sharding.describe_sharded_groups, models)))
            trace.facts = dataclasses.replace(trace.facts, groups=tuple(dict.fromkeys((*trace.facts.groups, *groups))))

    def get_quantized_parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in which a quantized `tensor` keeps its data and scales."""
        return get_quantized_parts(tensor)
