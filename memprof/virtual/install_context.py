"""The run as the parts of a virtual GPU are given it when they are put in place."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memprof.device.catalog import Gpu
from memprof.patching import PatchSet
from memprof.torch_private.check import refuse_missing
from memprof.trace.events import Trace
from memprof.trace.facts import RankFacts
from memprof.virtual.allocator_answers import AllocatorAnswers, AllocatorSettings, MemoryStatistics, SettingsOfRun
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.dispatch_mode import DispatchMode
from memprof.virtual.function_mode import FunctionMode
from memprof.virtual.gpus import Gpus
from memprof.virtual.limits import Note
from memprof.virtual.peers.alone import SingleRankBackend
from memprof.virtual.peers.channel import Channel
from memprof.virtual.peers.together import MultiRankBackend
from memprof.virtual.subprocesses import Subprocesses
from memprof.virtual.values import Values
from memprof.watch.recorder import Recorder

_NOT_LAUNCHED = "{} are not launched: what they write is unknown, and they allocate nothing."


@dataclass(frozen=True)
class GpuOptions:
    """The options of a virtual GPU, beside its model."""

    gpus: int = 1  # how many of them this process sees; of several, `memory` must tell them apart
    nodes: int = 1  # machines with so many GPUs, on which the program may have a rank for each
    rank: int = 0  # which of them the program is where it starts them itself
    channel: Channel | None = None  # to the ranks that run together with this one; None: it is alone
    context_bytes: int = 0  # what the CUDA context takes
    workspaces: bool = True  # whether to count library workspaces (cuBLAS, cuDNN's convolutions)
    tensors_only: bool = False  # count neither these nor any other memory that no tensor shows
    # What answers a program that asks for memory statistics, given the trace that is being recorded; requested only
    # then. None: the bytes of living tensors.
    memory: Callable[[Trace], MemoryStatistics] | None = None
    # What a Triton kernel's launch does. False: the run ends there, with the kernel's name. True: it is passed over,
    # which is right for kernels that only write tensors that they are given: memory is theirs to fill and not to
    # allocate. What autotuning takes for its timings is counted.
    passes_kernels: bool = False
    # What the program reads and sets as the settings of its caching allocator; None: a text.
    allocator_settings: AllocatorSettings | None = None
    # Whether a request that the GPU has no room for raises torch.OutOfMemoryError, as `memory` says it. False: the run
    # goes on, so that its whole need is known.
    refuses: bool = False
    compiles: bool = True  # whether torch.compile compiles for the GPU. False: what it is given runs eagerly


class InstallContext:
    """A run on a virtual GPU, as extensions see it (memprof/patching.py): an attribute for each of its parts.

    Args:
        gpu: the model of each GPU.
        options: what else it is to be.
        recorder: who writes the trace.
        run_patches: set until the run ends.
        assume: told what the run rests on.
        environment: variables that Pythons find which the program starts.
        refused: told what the program is refused: the problem, what to do instead, and the line.
        leave_in_child: called in a process that is forked in the run.

    Raises:
        MemprofError: torch lacks a private name that the virtual GPU cannot do without.
    """

    def __init__(
        self,
        gpu: Gpu,
        options: GpuOptions,
        recorder: Recorder,
        run_patches: PatchSet,
        assume: Callable[[str], None],
        environment: Mapping[str, str],
        refused: Note,
        leave_in_child: Callable[[], None],
    ) -> None:
        refuse_missing()
        self.gpu, self.options, self.run_patches = gpu, options, run_patches
        self.assume, self.refused, self.leave_in_child = assume, refused, leave_in_child
        # Several GeForce GPUs do not read each other's memory: NVIDIA's driver has it off.
        self.gpus = Gpus(options.gpus, recorder.trace.gpus, are_peers="GeForce" not in gpu.name)
        self.recorder, self.values = recorder, Values(assume)
        self.tracker = DispatchMode(recorder, self.values, DeviceProperties.of(gpu), self.gpus, options.workspaces)
        self.function_mode = FunctionMode(self.tracker)
        self.tracker.function_mode = self.function_mode
        self.is_on_gpu = self.tracker.is_on_gpu
        self.memory = AllocatorAnswers(recorder, options.memory)
        self.settings = SettingsOfRun(options.allocator_settings, self.memory, recorder, assume)
        self.channel = channel = options.channel
        self.others = (
            SingleRankBackend(assume, self.values)
            if channel is None
            else MultiRankBackend(assume, self.values, channel)
        )
        self.children = Subprocesses(environment)

    def note_written(self, tensor: torch.Tensor, by: str = "Triton kernels") -> None:
        """Note that a kernel which is passed over was given `tensor`, and may have written it."""
        self.assume(_NOT_LAUNCHED.format(by))
        self.forget_values(tensor)

    def forget_values(self, tensor: torch.Tensor) -> None:
        """Note that nothing is known any more of the numbers in `tensor`."""
        self.values.store.drop(tensor.untyped_storage()._cdata)

    def keep_workspace(self, num_bytes: int, name: str) -> None:
        """Allocate a workspace that a library keeps on the current GPU."""
        if self.tracker.workspaces:
            place = self.recorder.attribution.place(sys._getframe(1))
            self.recorder.storages.allocate_hidden(num_bytes, name, place, self.gpus.named())

    def note_joined(self, rank: RankFacts) -> None:
        """Note as which rank the program has joined a group."""
        self.recorder.owners.name_communication()
        if rank.world_size > 1:
            trace = self.recorder.trace
            trace.facts = dataclasses.replace(trace.facts, rank=rank)

    def used_bytes(self, device: str) -> int:
        """Return what is in use on a GPU, as nvidia-smi says it."""
        return self.options.context_bytes + self.memory.of(device).stats()["reserved_bytes.all.current"]
