"""`VirtualGpu`: puts the modes and the patches in place, and takes everything away again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memprof.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.patching.imports import watch_imports
from memprof.stand_ins import deepspeed, hub, requests, torchaudio, torchvision
from memprof.stand_ins.finder import StandIns
from memprof.stand_ins.packages import PACKAGES
from memprof.trace.events import NONE, Failure, Owner, Phase, PhaseKind, Role, Trace
from memprof.trace.facts import RankFacts
from memprof.virtual import python_functions, shapes
from memprof.virtual.card import Card
from memprof.virtual.cards import Cards
from memprof.virtual.compiled.compiler import Compiler
from memprof.virtual.devices import DeviceMode
from memprof.virtual.edges import (
    children,
    compiled,
    control_flow,
    data_parallel,
    extensions,
    generation,
    hub_kernels,
    loaders,
    native,
    processes,
    threads,
)
from memprof.virtual.kernels import audio, detection, quantized, registry
from memprof.virtual.kernels.whole import kept_whole
from memprof.virtual.limits import noting
from memprof.virtual.ranks import dtensor, joining, objects, rpc
from memprof.virtual.ranks.alone import Alone
from memprof.virtual.ranks.channel import Channel
from memprof.virtual.ranks.together import Together
from memprof.virtual.recording import RecordingMode
from memprof.virtual.torch_cuda import pools
from memprof.virtual.torch_cuda.driver import nvml_patches
from memprof.virtual.torch_cuda.facade import AllocatorSettings, Memory, MemoryStatistics, UnusedSettings, cuda_facade
from memprof.virtual.values import Values
from memprof.watch import sharding
from memprof.watch.failure import describe, ended_by_refusal, refusal
from memprof.watch.growth import GrowthWatch
from memprof.watch.recorder import Recorder
from memprof.watch.source_lines import only_shows
from memprof.watch.updates import Updates
from memprof.watch.watch import Watch

_active: VirtualGpu | None = None


class VirtualGpu(Watch):
    """A context manager in which `cuda:0` is a virtual card and every allocation on it is recorded.

    Args:
        gpu: the card to be.
        cards: how many of them this process sees; of several, `memory` must tell them apart.
        nodes: machines with so many cards, on which the program may have a rank for each.
        rank: which of them the program is where it starts them itself.
        channel: to the ranks that run together with this one; None: it is alone.
        context_bytes: what the CUDA context takes of it.
        workspaces: whether to count library workspaces (cuBLAS, cuDNN's convolutions).
        tensors_only: count neither these nor any other memory that no tensor shows.
        memory: what answers a program that asks for memory statistics, given the trace that is being recorded; asked
            for only then. None: the bytes of living tensors.
        passes_kernels: what a Triton kernel's launch does. False: the run ends there, with the kernel's name. True: it
            is passed over, which is right for kernels that only write tensors that they are given: memory is theirs to
            fill and not to allocate. What autotuning takes for its timings is counted.
        allocator_settings: what the program reads and sets as the settings of its caching allocator.
        refuses: whether a request that the card has no room for raises torch.OutOfMemoryError, as `memory` says it.
            False: the run goes on, so that its whole need is known.
        compiles: whether torch.compile compiles for the card. False: what it is given runs eagerly.
        stand_ins: whether packages that are not installed are stood in for (docs/stand-ins.md).

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
        cards: int = 1,
        nodes: int = 1,
        rank: int = 0,
        channel: Channel | None = None,
        context_bytes: int = 0,
        workspaces: bool = True,
        tensors_only: bool = False,
        memory: Callable[[Trace], MemoryStatistics] | None = None,
        passes_kernels: bool = False,
        allocator_settings: AllocatorSettings | None = None,
        refuses: bool = False,
        compiles: bool = True,
        stand_ins: bool = True,
    ) -> None:
        super().__init__()
        self.gpu = gpu
        self.recorder = Recorder(self.modules)
        self.recorder.counts_hidden = not tensors_only
        self._unknown_read: tuple[int, str] | None = None
        self._only_show: dict[int, bool] = {}
        """Lines that have read an unknown value, and whether all that they do is to show it."""
        self._watches_kernels = False
        self._passes_kernels = passes_kernels
        self._watches_quantized = False
        self._growth = GrowthWatch(self.recorder)
        self._children = children.Children(PACKAGES if stand_ins else ())
        self._refused: Failure | None = None
        self._context_bytes = context_bytes
        self._memory = Memory(self.recorder, memory)
        self._cards = Cards(cards, self.recorder.trace.cards, are_peers=_are_peers(gpu))
        self._nodes, self._rank, self._channel = nodes, rank, channel
        self._compiles = compiles
        self._stand_ins = StandIns(self.assume, self._forget_values, self._keep) if stand_ins else None
        self._roots_noted = 0
        """Of so many models it is known how they are spread over ranks."""
        self._allocator_settings = _Settings(allocator_settings or UnusedSettings(), self)
        if refuses:
            self.recorder.refusal = self._refusal
        card = Card.of(gpu)
        self._values = Values(self.assume)
        self._values.on_unknown = self._note_unknown
        self.recording = RecordingMode(self.recorder, self._values, card, self._cards, workspaces)
        self._updates = self.recording.updates = Updates(self.recorder, self.phases, self._name_parameters)
        self._updates.on_step = lambda: self._growth.phase_begins(PhaseKind.OPTIMIZER_STEP, in_step=True)
        self.recorder.on_death = self.recording.forget
        self.modules.on_outermost_return = self._outermost_return

    @property
    def trace(self) -> Trace:
        """What has been recorded."""
        trace = self.recorder.trace
        trace.work = self.recording.meter.finish()
        self._tell(trace)
        return trace

    @property
    def held_bytes(self) -> int:
        """Bytes on the card now."""
        return self.recorder.live_bytes

    @property
    def num_events(self) -> int:
        """Events recorded so far."""
        return len(self.recorder.trace.events)

    @property
    def refused(self) -> Failure | None:
        """What the program was refused first, or a process of its own, whether or not it went on without."""
        for problem, hint in self._children.refused() if self._refused is None else ():
            self._note_refused(problem, hint, None)
        return self._refused

    def memory_changed(self) -> None:
        """The allocator's settings are others than before."""
        self._memory.settings_changed()

    # -- in and out -------------------------------------------------------------------------------------------------

    def __enter__(self) -> VirtualGpu:
        global _active
        if _active is not None:
            raise MemprofError("a virtual GPU is already active", hint=_active.instead_of_another)
        _active = self
        if self._cards.several:
            copy = "directly" if self._cards.are_peers else "through buffers, as GeForce cards do"
            self.assume(f"The {self._cards.number} cards are alike; what is copied between them goes {copy}.")
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def _refusal(self, device: str) -> str | None:
        message = self._memory.of(device).refusal()
        if message is not None:
            self._claim_registered()
        return message

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._claim_registered()
        self._updates.run_ends()
        if ended_by_refusal(error) and self.recorder.trace.refused:
            # The run ends where the card is full: that is its verdict, and no failure.
            self.recorder.trace.refused.pop()
            self.recorder.trace.cut_short = True
        elif (refused := self.refused) is not None:
            self.recorder.trace.failure = refused
        elif isinstance(error, (Exception, KeyboardInterrupt)) and not isinstance(error, UsageError):
            self.recorder.trace.failure = describe(
                error,
                self.recorder,
                self.phase_of(error),
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
            self._patches.set_all(compiled.triton_patches(self._written if self._passes_kernels else None))
        if not self._watches_quantized and quantized.is_loaded():
            self._watches_quantized = True
            self._patches.set_all(quantized.patches(self.assume))
            self._function_mode.run_cuda_kernels_of(quantized.operators())

    def _written(self, tensor: torch.Tensor, by: str = "Triton kernels") -> None:
        """A kernel that is passed over was given `tensor`, and may have written it."""
        self.assume(f"{by} are not launched: what they write is unknown, and they allocate nothing.")
        self._forget_values(tensor)

    def _keep(self, num_bytes: int, name: str) -> None:
        """A library keeps a workspace on the current card."""
        if self.recording.workspaces:
            place = self.recorder.place(sys._getframe(1))
            self.recorder.allocate_hidden(num_bytes, name, place, self._cards.named())

    def _forget_values(self, tensor: torch.Tensor) -> None:
        self._values.drop(tensor.untyped_storage()._cdata)

    def _note_unknown(self, tensor: torch.Tensor, told: str) -> None:
        where = self.recorder.caller()
        if where not in self._only_show:
            self._only_show[where] = where != NONE and only_shows(self.recorder.trace.sources[where])
        if not self._only_show[where]:
            self._unknown_read = (where, told)

    def _note_refused(self, problem: str, hint: str | None, line: str | None) -> None:
        if self._refused is None:
            self._refused = refusal(problem, hint, line, self.current_phase)

    def _install(self) -> None:
        patches = self._patches
        function_mode = self._function_mode = DeviceMode(self.recording, registry.composites(self.recording))
        self.recording.function_mode = function_mode
        self._compiler = Compiler(self.recording, function_mode, patches, self.assume, is_on=self._compiles)
        patches.set_all(python_functions.run_inside())
        patches.set_all(
            cuda_facade(
                self.gpu, self._cards, self.recorder, self._context_bytes, self._memory, self._allocator_settings
            )
        )
        patches.set(torch._C, "_cuda_clearCublasWorkspaces", self.recording.clear_workspaces)
        patches.set_all(function_mode.interchange.patches())
        patches.set_all(pools.patches(self.recorder, self.assume))
        patches.set_all(compiled.patches(self.assume))
        patches.set_all(control_flow.patches())
        patches.set_all(data_parallel.patches())
        patches.set_all(
            native.patches(
                self.recording.is_on_card,
                functools.partial(self._written, by=native.COMPILED) if self._passes_kernels else None,
            )
        )
        patches.set_all(loaders.patches(self.assume, self.recording.is_on_card))
        channel = self._channel
        cards = self._cards.number
        patches.set_all(processes.patches(self.assume, self.recording, cards, self._rank, exactly=channel is not None))
        self._stack.enter_context(self._children)
        self._stack.enter_context(noting(self._note_refused))
        patches.set_all(self._children.patches())
        patches.set_all(threads.Threads(self.recording, self._modes_of_thread, self.assume).patches())
        others = Alone(self.assume, self._values) if channel is None else Together(self.assume, self._values, channel)
        groups = joining.Joining(
            cards * self._nodes,
            others,
            self.recording.is_on_card,
            self.recorder,
            self.assume,
            self._joined_group,
            channel,
            self.recording.meter.sent,
        )
        patches.set_all(groups.patches())
        self._stack.enter_context(joining.groups_end_with_the_run())
        self._stack.enter_context(function_mode.interchange.safetensors.opening())
        self._stack.enter_context(loaders.collating_here())
        self._stack.enter_context(processes.left_in_children(self._leave_in_child))
        patches.set_all(self._compiler.patches())
        self._stack.enter_context(self._compiler.entered())
        patches.set(*quantized.load_error_is_silent())
        self._watch_kernels()
        self._watch_program()
        later = {
            "bitsandbytes": self._watch_kernels,
            "triton.testing": self._watch_kernels,  # imported when its driver is there, which packages ask at once
            "transformers.generation.utils": lambda: patches.set_all(generation.patches(self._values, self.assume)),
            "torchvision": self._watch_detection,
            "torchaudio": audio.register_loaded,
            "torch.distributed.checkpoint.default_planner": lambda: patches.set_all(objects.checkpoint_patches(others)),
            "torch.distributed.fsdp._optim_utils": lambda: patches.set_all(objects.fsdp_patches()),
            "pynvml": lambda: patches.set_all(nvml_patches(self.gpu, self._cards, self._used_bytes)),
        }
        replacements = hub_kernels.patches(self.assume) | dtensor.patches() | rpc.patches()
        if self._stand_ins is not None:
            self._stack.enter_context(self._stand_ins.entered())
            replacements |= requests.patches(self._stand_ins.choose) | hub.patches()
            replacements |= torchvision.patches(self.assume) | torchaudio.patches(self.assume)
            replacements |= deepspeed.patches(self.assume)
            if self._passes_kernels:
                replacements |= extensions.patches(self._forget_values, self.assume, patches.set)
        for name, replaced in replacements.items():
            later[name] = functools.partial(self._replace_in, name, replaced)
        self._stack.enter_context(watch_imports(later))
        patches.set(torch._tensor_str, "_str", function_mode.repr_of(torch._tensor_str._str))
        by_device = "_group_tensors_by_device_and_dtype"
        patches.set(torch._C, by_device, function_mode.grouping(getattr(torch._C, by_device)))
        compatible = "_has_compatible_shallow_copy_type"
        patches.set(torch, compatible, function_mode.shares_data(getattr(torch, compatible)))
        patches.set_all(function_mode.kinds.patches())
        self._patch_saved_tensor_hooks(function_mode)
        self._watch_autocast(function_mode)
        self._stack.enter_context(kept_whole())
        self._stack.enter_context(shapes.made_in_cpp())
        self._stack.enter_context(function_mode)
        self._stack.enter_context(self.recording)

    def _watch_detection(self) -> None:
        detection.register_loaded()
        self._function_mode.run_in_float32(detection.autocast_in_float32())

    def _modes_of_thread(self, recording: RecordingMode) -> DeviceMode:
        """The function mode of another thread, whose dispatch mode is `recording`."""
        mode = recording.function_mode = DeviceMode(recording, registry.composites(recording))
        mode.interchange.share(self._function_mode.interchange)
        if self._watches_quantized:
            mode.run_cuda_kernels_of(quantized.operators())
        mode.run_in_float32(detection.autocast_in_float32())
        return mode

    def _replace_in(self, name: str, replaced: Callable[[Any], Iterator[tuple[Any, str, Any]]]) -> None:
        self._patches.set_all(replaced(sys.modules[name]))

    def _joined_group(self, rank: RankFacts) -> None:
        self.recorder.communicates = True
        if rank.world_size > 1:
            trace = self.recorder.trace
            trace.facts = dataclasses.replace(trace.facts, rank=rank)

    def _used_bytes(self, device: str) -> int:
        """What is in use on a card, as nvidia-smi says it."""
        return self._context_bytes + self._memory.of(device).stats()["reserved_bytes.all.current"]

    def _remove(self) -> None:
        global _active
        _active = None
        try:
            self._unwatch()
        finally:
            self.recorder.close()
            fake = sys.modules.get("torch._subclasses.fake_tensor")
            if fake is not None:
                # Its results say which card was current, that of a rank among them; the cache is one for the process.
                fake.FakeTensorMode.cache_clear()

    def _leave_in_child(self) -> None:
        """This is a forked child: nothing of the virtual GPU acts here."""
        global _active
        _active = None
        self._watches_kernels = self._watches_quantized = True
        self.recorder.stop()
        self._compiler.leave_in_child()
        self._patches.undo()
        self._function_mode.interchange.safetensors.is_off = True
        processes.switch_off(self._function_mode, self.recording, self._children.file)

    # -- phases -----------------------------------------------------------------------------------------------------

    @property
    def current_phase(self) -> Phase:
        """The phase that is running."""
        return self.recorder.phase

    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """From here on, what happens belongs to this phase."""
        self.recorder.begin_phase(kind, step, micro_batch)

    def _phase_recognised(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        self._updates.phase_begins(kind)
        super()._phase_recognised(kind, step, micro_batch)
        self._growth.phase_begins(kind, in_step=self.phases.is_stepping)

    def _outermost_call(self, module: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        super()._outermost_call(module, index, args, kwargs)
        self.recording.caches.call_begins(index, (*args, *kwargs.values()))
        if self.phases.recognises and torch._C._current_graph_task_id() == -1:
            self._growth.call_begins(module, index)

    def claim_input(self, tensor: torch.Tensor) -> None:
        """`tensor` was given to a model."""
        if self.recorder.made_outside_modules(tensor):
            self.recorder.own(tensor, Owner(Role.INPUT, ""))

    def _outermost_return(self, result: Any) -> None:
        """That call returns."""
        self.recording.caches.call_returned(result)
        if self.phases.recognises and torch._C._current_graph_task_id() == -1:
            self._growth.call_returned(result)

    def adopt(self, root: nn.Module) -> None:
        """`root` is a model of this run: its parameters and buffers are named after it."""
        self._watch_kernels()
        super().adopt(root)

    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """`tensor` has this role, as the workload knows."""
        self.recorder.own(tensor, owner)

    def _name_parameters(self) -> None:
        super()._name_parameters()
        if self.recorder.communicates and self.phases.backwards:  # before, wrappers do not know all of themselves
            self._note_sharding()

    def _note_sharding(self) -> None:
        """How the run's models are spread over ranks; and gradients that wait, whole, to be reduced."""
        roots = [root for known in self._roots if (root := known()) is not None]
        for name, gradient in itertools.chain.from_iterable(map(sharding.unreduced, roots)):
            self.claim(gradient, Owner(Role.GRADIENT, name))
        if len(roots) != self._roots_noted:
            self._roots_noted = len(roots)
            trace = self.recorder.trace
            groups = tuple(itertools.chain.from_iterable(map(sharding.groups_of, roots)))
            trace.facts = dataclasses.replace(trace.facts, groups=tuple(dict.fromkeys((*trace.facts.groups, *groups))))

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that a quantized `tensor` keeps beside its own data, or instead of it."""
        return quantized.parts(tensor)

    # -- what is watched --------------------------------------------------------------------------------------------

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


def _are_peers(gpu: Gpu) -> bool:
    """Whether several such cards read each other's memory: NVIDIA's driver has it off for GeForce."""
    return "GeForce" not in gpu.name


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
