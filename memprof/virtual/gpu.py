"""`VirtualGpu`: puts the modes and the patches in place, watches the run's phases, and takes everything away again."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memprof.catalog import Gpu
from memprof.errors import MemprofError
from memprof.trace.events import Owner, Phase, PhaseKind, Role, Trace
from memprof.virtual.card import Card
from memprof.virtual.devices import DeviceMode, python_functions_run_inside
from memprof.virtual.edges import compiled, distributed, generation, loaders, native, processes
from memprof.virtual.kernels import quantized, registry
from memprof.virtual.kernels.matrix_products import CublasWorkspace
from memprof.virtual.kernels.whole import kept_whole
from memprof.virtual.recording import RecordingMode
from memprof.virtual.torch_cuda.driver import nvml_patches
from memprof.virtual.torch_cuda.facade import AllocatorSettings, Memory, MemoryStatistics, UnusedSettings, cuda_facade
from memprof.virtual.values import Values
from memprof.watch.failure import describe, ended_by_refusal
from memprof.watch.growth import GrowthWatch
from memprof.watch.imports import watch_imports
from memprof.watch.modules import ModuleTracker
from memprof.watch.patches import Patches
from memprof.watch.phases import Phases
from memprof.watch.recorder import Recorder

_active: VirtualGpu | None = None


class VirtualGpu:
    """A context manager in which `cuda:0` is a virtual card and every allocation on it is recorded.

    Args:
        gpu: the card to be.
        context_bytes: what the CUDA context takes of it.
        workspaces: whether to count library workspaces (cuBLAS).
        tensors_only: count neither these nor any other memory that no tensor shows.
        memory: what answers a program that asks for memory statistics, given the trace that is being recorded; asked
            for only then. None: the bytes of living tensors.
        passes_kernels: what a Triton kernel's launch does. False: the run ends there, with the kernel's name. True: it
            is passed over, which is right for kernels that only write tensors that they are given: memory is theirs to
            fill and not to allocate. What autotuning allocates for its timings is not counted.
        allocator_settings: what the program reads and sets as the settings of its caching allocator.
        refuses: whether a request that the card has no room for raises torch.OutOfMemoryError, as `memory` says it.
            False: the run goes on, so that its whole need is known.

    Raises:
        MemprofError: a virtual GPU is already active.
    """

    name = "cuda"
    """Where its tensors are, as the program says it."""
    instead_of_another = "leave it before entering another"
    """What a program can do that enters another inside this one."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        context_bytes: int = 0,
        workspaces: bool = True,
        tensors_only: bool = False,
        memory: Callable[[Trace], MemoryStatistics] | None = None,
        passes_kernels: bool = False,
        allocator_settings: AllocatorSettings | None = None,
        refuses: bool = False,
    ) -> None:
        self.gpu = gpu
        self.modules = ModuleTracker()
        self.recorder = Recorder(self.modules)
        self.recorder.counts_hidden = not tensors_only
        self._assumptions: dict[str, None] = {}
        self._roots: list[weakref.ref[nn.Module]] = []
        """The run's models; one that the program lets go of is gone."""
        self._failed: tuple[int, Phase] | None = None
        """The `id` of what was raised last inside a phase, and the phase; the exception itself would keep tensors."""
        self._unknown_read: tuple[int, str] | None = None
        self._watches_kernels = False
        self._passes_kernels = passes_kernels
        self._watches_quantized = False
        self._growth = GrowthWatch(self.recorder)
        self._patches = Patches()
        self._modes = contextlib.ExitStack()
        self._context_bytes = context_bytes
        self._memory = Memory(self.recorder, memory)
        self._allocator_settings = _Settings(allocator_settings or UnusedSettings(), self)
        if refuses:
            self.recorder.refusal = lambda: self._memory.now.refusal()
        card = Card.of(gpu)
        workspace = CublasWorkspace.of(card.compute_capability, card.release)
        self._values = Values(self.assume)
        self._values.on_unknown = self._note_unknown
        self.recording = RecordingMode(self.recorder, self._values, workspace if workspaces else None, card)
        self.recorder.on_death = self.recording.forget
        self.modules.on_root = self.adopt
        self.phases = Phases(self._begin_phase, lambda: self.recorder.phase)
        """Those of a program that does not name its own."""
        self.modules.on_outermost = self._outermost_call
        self.modules.on_outermost_return = self._outermost_return

    @property
    def trace(self) -> Trace:
        """What has been recorded."""
        trace = self.recorder.trace
        trace.assumptions = list(self._assumptions)
        trace.work = self.recording.meter.finish()
        trace.trains = self.phases.trains
        return trace

    @property
    def held_bytes(self) -> int:
        """Bytes on the card now."""
        return self.recorder.live_bytes

    def memory_changed(self) -> None:
        """The allocator's settings are others than before."""
        self._memory.settings_changed()

    def assume(self, sentence: str) -> None:
        """The run rests on this; said once."""
        self._assumptions.setdefault(sentence)

    # -- in and out -------------------------------------------------------------------------------------------------

    def __enter__(self) -> VirtualGpu:
        global _active
        if _active is not None:
            raise MemprofError("a virtual GPU is already active", hint=_active.instead_of_another)
        _active = self
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if ended_by_refusal(error) and self.recorder.trace.refused:
            # The run ends where the card is full: that is its verdict, and no failure.
            self.recorder.trace.refused.pop()
            self.recorder.trace.cut_short = True
        elif isinstance(error, Exception) and not isinstance(error, MemprofError):
            at_raise = self._failed
            phase = at_raise[1] if at_raise and at_raise[0] == id(error) else self.recorder.phase
            self.recorder.trace.failure = describe(
                error,
                self.recorder,
                (phase.kind, phase.step),
                self._unknown_read,
                RecordingMode.__torch_dispatch__.__code__,
            )
        if error is None and self.phases.recognises:
            self._growth.run_ends()
        self._remove()

    def _watch_kernels(self) -> None:
        """Triton and bitsandbytes may be imported with the model, after this GPU was entered."""
        if not self._watches_kernels and "triton.runtime.jit" in sys.modules:
            self._watches_kernels = True
            for owner, name, value in compiled.triton_patches(self._written if self._passes_kernels else None):
                self._patches.set(owner, name, value)
        if not self._watches_quantized and quantized.is_loaded():
            self._watches_quantized = True
            for owner, name, value in quantized.patches(self.assume):
                self._patches.set(owner, name, value)
            self._function_mode.run_cuda_kernels_of(quantized.operators())

    def _written(self, tensor: torch.Tensor) -> None:
        """A kernel that is passed over was given `tensor`, and may have written it."""
        self.assume("Triton kernels are not launched: what they write is unknown, and they allocate nothing.")
        self._values.drop(tensor.untyped_storage()._cdata)

    def _note_failed(self, error: BaseException) -> None:
        if self._failed is None or self._failed[0] != id(error):  # the innermost phase knows best
            self._failed = (id(error), self.recorder.phase)

    def _note_unknown(self, tensor: torch.Tensor, told: str) -> None:
        self._unknown_read = (self.recorder.caller(), told)

    def _install(self) -> None:
        patches = self._patches
        function_mode = self._function_mode = DeviceMode(self.recording, registry.composites(self.recording))
        for owner, name, value in python_functions_run_inside():
            patches.set(owner, name, value)
        for owner, name, value in cuda_facade(
            self.gpu, self.recorder, self._context_bytes, self._memory, self._allocator_settings
        ):
            patches.set(owner, name, value)
        for owner, name, value in function_mode.interchange.patches():
            patches.set(owner, name, value)
        for owner, name, value in compiled.patches(self.assume):
            patches.set(owner, name, value)
        for owner, name, value in native.patches(self.recording.is_on_card):
            patches.set(owner, name, value)
        for owner, name, value in loaders.patches(self.assume, self.recording.is_on_card):
            patches.set(owner, name, value)
        for owner, name, value in processes.patches(self.assume, self.recording.is_virtual):
            patches.set(owner, name, value)
        for owner, name, value in distributed.patches(self.assume, self.recording.is_on_card):
            patches.set(owner, name, value)
        self._modes.enter_context(distributed.groups_end_with_the_run())
        self._modes.enter_context(function_mode.interchange.safetensors.opening())
        self._modes.enter_context(loaders.collating_here())
        self._modes.enter_context(processes.left_in_children(self._leave_in_child))
        self._modes.enter_context(compiled.eager())
        self._watch_kernels()
        for owner, name, value in self.phases.patches():
            patches.set(owner, name, value)
        libraries: dict[str, Callable[[], None]] = {
            name: functools.partial(self._replace, of_library) for name, of_library in self.phases.of_imports().items()
        }
        of_generation = libraries["transformers.generation.utils"]

        def generation_imported() -> None:
            of_generation()
            self._replace(lambda: generation.patches(self._values, self.assume))

        libraries["transformers.generation.utils"] = generation_imported
        libraries["pynvml"] = functools.partial(self._replace, lambda: nvml_patches(self.gpu, self._used_bytes))
        self._modes.enter_context(watch_imports({"bitsandbytes": self._watch_kernels, **libraries}))
        patches.set(torch._tensor_str, "_str", function_mode.repr_of(torch._tensor_str._str))
        by_device = "_group_tensors_by_device_and_dtype"
        patches.set(torch._C, by_device, function_mode.grouping(getattr(torch._C, by_device)))
        compatible = "_has_compatible_shallow_copy_type"
        patches.set(torch, compatible, function_mode.shares_data(getattr(torch, compatible)))
        patches.set(nn.Module, "__call__", self.modules.wrap_call(nn.Module.__call__))
        self._patch_backward()
        self._patch_saved_tensor_hooks(function_mode)
        self._watch_optimizers()
        self._watch_autocast(function_mode)
        self._modes.enter_context(kept_whole())
        self._modes.enter_context(function_mode)
        self._modes.enter_context(self.recording)

    def _used_bytes(self) -> int:
        """What is in use on the card, as nvidia-smi says it."""
        return self._context_bytes + self._memory.now.stats()["reserved_bytes.all.current"]

    def _replace(self, patches: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        for owner, name, value in patches():
            self._patches.set(owner, name, value)

    def _remove(self) -> None:
        global _active
        _active = None
        try:
            self._modes.close()
        finally:
            self._patches.undo()
            self.recorder.close()
            self._roots.clear()

    def _leave_in_child(self) -> None:
        """This is a forked child: nothing of the virtual GPU acts here."""
        global _active
        _active = None
        self._watches_kernels = self._watches_quantized = True
        self.recorder.stop()
        self._patches.undo()
        self._function_mode.interchange.safetensors.is_off = True
        processes.switch_off(self._function_mode, self.recording)

    # -- phases -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """What runs inside is this phase; a workload that knows its phases names them, and none are guessed."""
        recognised, self.phases.recognises = self.phases.recognises, False
        before = self.recorder.phase
        self.recorder.begin_phase(kind, step, micro_batch)
        try:
            yield
        except BaseException as error:
            self._note_failed(error)
            raise
        finally:
            self.phases.recognises = recognised
            self.recorder.begin_phase(*before)

    def _begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """A phase that was recognised in a program that does not name its own."""
        self.recorder.begin_phase(kind, step, micro_batch)
        self._growth.phase_begins(kind)

    def _outermost_call(self, module: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        """A module is called from outside all others."""
        self.phases.forward(module)
        if self.phases.recognises and torch._C._current_graph_task_id() == -1:
            self._growth.call_begins(module, index)
            if next(module.parameters(), None) is not None:  # a loss has none
                self._claim_inputs((*args, *kwargs.values()))

    def _claim_inputs(self, values: Iterable[Any]) -> None:
        """What a program made outside its models and gives to one is input; results of models are not."""
        for value in values:
            if isinstance(value, (list, tuple)):
                self._claim_inputs(value)
            elif isinstance(value, dict):
                self._claim_inputs(value.values())
            elif type(value) is torch.Tensor and value.grad_fn is None and self.recorder.made_outside_modules(value):
                self.recorder.own(value, Owner(Role.INPUT, ""))

    def _outermost_return(self, result: Any) -> None:
        """That call returns."""
        if self.phases.recognises and torch._C._current_graph_task_id() == -1:
            self._growth.call_returned(result)

    def adopt(self, root: nn.Module) -> None:
        """`root` is a model of this run: its parameters and buffers are named after it."""
        if not any(known() is root for known in self._roots):
            self._roots.append(weakref.ref(root))
        self.modules.add_root(root)
        self._watch_kernels()
        self.name_parameters()

    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """`tensor` has this role, as the workload knows."""
        self.recorder.own(tensor, owner)

    def name_parameters(self) -> None:
        """Tell the recorder which storages are parameters, buffers and gradients."""
        for root in [root for known in self._roots if (root := known()) is not None]:
            for name, parameter in root.named_parameters():
                self.recorder.own(parameter, Owner(Role.PARAMETER, name))
                for part in quantized.parts(parameter):
                    self.recorder.own(part, Owner(Role.PARAMETER, name))
                if parameter.grad is not None:
                    self.recorder.own(parameter.grad, Owner(Role.GRADIENT, name))
            for name, buffer in root.named_buffers():
                self.recorder.own(buffer, Owner(Role.BUFFER, name))

    def name_optimizer_state(self, optimizer: Optimizer) -> None:
        """Tell the recorder which storages are this optimizer's state."""
        for state in optimizer.state.values():
            for key, value in state.items():
                for tensor in value if isinstance(value, list) else [value]:  # LBFGS keeps lists of directions
                    if isinstance(tensor, torch.Tensor):
                        for part in quantized.parts(tensor) or [tensor]:
                            self.recorder.own(part, Owner(Role.OPTIMIZER_STATE, str(key)))

    # -- what is watched --------------------------------------------------------------------------------------------

    def _patch_backward(self) -> None:
        original = torch.autograd.graph._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            nested = torch._C._current_graph_task_id() != -1
            if not nested:
                self.phases.backward()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._note_failed(error)
                raise
            finally:
                if not nested:
                    self.name_parameters()
                    self.phases.after_backward()

        self._patches.set(torch.autograd, "_engine_run_backward", run_backward)

    def _patch_saved_tensor_hooks(self, mode: DeviceMode) -> None:
        """Saved-tensor hooks (checkpointing, save_on_cpu) are called from inside C++ functions, where the function mode
        is off: there they would see meta tensors, and checkpointing would find that devices have changed."""
        original = torch._C._autograd._push_saved_tensors_default_hooks

        def under_mode(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def call(value: Any) -> Any:
                if torch._C._len_torch_function_stack():
                    return hook(value)
                with mode:
                    return hook(value)

            return call

        def push(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
            original(under_mode(pack), under_mode(unpack))

        self._patches.set(torch._C._autograd, "_push_saved_tensors_default_hooks", push)

    def _watch_autocast(self, mode: DeviceMode) -> None:
        """The half copies of weights live as long as the outermost autocast region."""
        original = torch.clear_autocast_cache

        def clear() -> None:
            original()
            mode.autocast.clear_cache()

        self._patches.set(torch, "clear_autocast_cache", clear)
        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        recording = self.recording

        def run(*args: Any, **kwargs: Any) -> Any:
            # A dispatch mode runs with autocast off; what the engine calls inside a region is cast all the same.
            outer = recording.cast
            recording.cast = mode.autocast.cast if torch.is_autocast_enabled("cuda") else None
            try:
                return run_backward(*args, **kwargs)
            finally:
                recording.cast = outer

        self._patches.set(torch.autograd, "_engine_run_backward", run)

    def _watch_optimizers(self) -> None:
        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.name_optimizer_state(optimizer)

        # Before the phases' own: who is told that a step was made may end the run.
        for handle in (register_optimizer_step_post_hook(after), *self.phases.hooks()):
            self._modes.callback(handle.remove)


class _Settings:
    """The allocator's settings; a run has one configuration, and says so where the program changes it late."""

    def __init__(self, settings: AllocatorSettings, gpu: VirtualGpu) -> None:
        self._settings = settings
        self._gpu = gpu
        self.get = settings.get

    def set(self, alloc_conf: str) -> None:
        """For the whole run."""
        self._settings.set(alloc_conf)
        self._gpu.memory_changed()
        recorder = self._gpu.recorder
        if recorder.peak_bytes:
            self._gpu.assume(
                f"The allocator's settings {alloc_conf!r} hold from the first allocation on; the program set them when "
                f"{recorder.live_bytes:,} bytes were on the card."
            )
