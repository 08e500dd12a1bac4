"""Options of a virtual GPU, and the objects of its run that extensions use."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memprof.allocator.releases import Libraries, find_libraries
from memprof.device.catalog import Gpu
from memprof.patching import PatchSet
from memprof.serving.budget import EngineBudget
from memprof.torch_private.check import check_required_names
from memprof.trace.events import Trace
from memprof.trace.facts import RankFacts
from memprof.virtual.allocator_answers import AllocatorAnswers, AllocatorSettings, MemoryStatistics, RunSettings
from memprof.virtual.device_properties import DeviceProperties, torch_release
from memprof.virtual.dispatch_mode import DispatchMode
from memprof.virtual.function_mode import FunctionMode
from memprof.virtual.gpus import Gpus
from memprof.virtual.limits import UnsupportedHandler
from memprof.virtual.peers.channel import Channel
from memprof.virtual.peers.multi_rank import MultiRankBackend
from memprof.virtual.peers.single_rank import SingleRankBackend
from memprof.virtual.subprocesses import Subprocesses
from memprof.virtual.values import Values
from memprof.watch.recorder import Recorder

_OTHER_RELEASE = (
    "The allocator, CUDA's libraries and what kernels take beside tensors are those of torch {}; operators are those "
    "of the installed torch {}."
)
_NOT_LAUNCHED = "{} are not launched: what they write is unknown, and they allocate nothing."


@dataclass(frozen=True)
class GpuOptions:
    """The options of a virtual GPU, besides its model."""

    gpus: int = 1  # number of GPUs that this process sees; with several, `memory` must distinguish them
    nodes: int = 1  # number of machines with `gpus` GPUs each; the program may have a rank for each GPU
    rank: int = 0  # this process's rank, where the program starts the ranks itself
    channel: Channel | None = None  # channel to the ranks that run together with this one; None: a single rank
    context_bytes: int = 0  # size of the CUDA context
    workspaces: bool = True  # whether to count library workspaces (cuBLAS, cuDNN's convolutions)
    tensors_only: bool = False  # count neither workspaces nor any other memory without a tensor
    # Creates the allocator's statistics from the trace that is being recorded, at the program's first query. None: the
    # bytes of live tensors.
    memory: Callable[[Trace], MemoryStatistics] | None = None
    # Launch of a Triton kernel. False: ends the run with the kernel's name. True: the launch is skipped, which is right
    # for kernels that only write tensors among their arguments and allocate nothing. The memory of autotuning is
    # counted.
    skips_kernels: bool = False
    # The settings of the caching allocator that the program reads and sets; None: plain text without effect.
    allocator_settings: AllocatorSettings | None = None
    # Whether a failed allocation raises torch.OutOfMemoryError, as `memory` reports it. False: the run goes on, so that
    # the trace shows its whole need.
    raises_oom: bool = False
    # Whether `Trace.callers` are recorded. memprof's own workloads have none.
    records_callers: bool = True
    release: tuple[int, int] | None = None  # torch whose kernels and libraries are simulated; None: the installed one
    compiles: bool = True  # whether torch.compile compiles for the GPU. False: compiled functions run eagerly


class InstallContext:
    """Objects of a run on a virtual GPU, one attribute each, as extensions use them (memprof/patching.py).

    Args:
        gpu: the model of each GPU.
        options: options of the virtual GPU besides its model.
        recorder: the recorder of the trace.
        run_patches: set of patches, which are removed when the run ends.
        assume: called with each assumption of the run.
        environment: environment variables of the Python processes that the program starts.
        on_unsupported: called with the problem, the hint and the source line of each unsupported operation.
        leave_in_child: called in a process that the run forks.

    Raises:
        MemprofError: torch lacks a private name that the virtual GPU needs.
    """

    def __init__(
        self,
        gpu: Gpu,
        options: GpuOptions,
        recorder: Recorder,
        run_patches: PatchSet,
        assume: Callable[[str], None],
        environment: Mapping[str, str],
        on_unsupported: UnsupportedHandler,
        leave_in_child: Callable[[], None],
    ) -> None:
        check_required_names()
        self.gpu, self.options, self.run_patches = gpu, options, run_patches
        self.assume, self.on_unsupported, self.leave_in_child = assume, on_unsupported, leave_in_child
        # GeForce GPUs do not read each other's memory: NVIDIA's driver disables peer access.
        self.gpus = Gpus(options.gpus, gpu.device_type, recorder.trace.gpus, are_peers="GeForce" not in gpu.name)
        self.recorder, self.values = recorder, Values(assume)
        self.dispatch_mode = DispatchMode(
            recorder, self.values, DeviceProperties.from_gpu(gpu, options.release), self.gpus, options.workspaces
        )
        if options.release is not None and options.release != torch_release():
            assume(_OTHER_RELEASE.format(".".join(map(str, options.release)), torch.__version__))
        self.function_mode = FunctionMode(self.dispatch_mode)
        self.dispatch_mode.function_mode = self.function_mode
        self.is_on_gpu = self.dispatch_mode.is_on_gpu
        self.memory = AllocatorAnswers(recorder, options.memory)
        self.settings = RunSettings(options.allocator_settings, self.memory, recorder, assume)
        self.channel = channel = options.channel
        self.rank_backend = (
            SingleRankBackend(assume, self.values)
            if channel is None
            else MultiRankBackend(assume, self.values, channel)
        )
        self.subprocesses = Subprocesses(environment)
        # Memory on each GPU that grows outside the allocator and that no rule computes, from published figures.
        self.outside_torch_bytes = 0
        # Called with the EngineBudget of an inference engine once it has started, or has refused to.
        self.on_engine_start: Callable[[EngineBudget], None] = lambda budget: None

    @property
    def libraries(self) -> Libraries:
        """Return the CUDA libraries of the simulated torch release."""
        return find_libraries(self.dispatch_mode.gpu.release)

    def mark_written(self, tensor: torch.Tensor, by: str = "Triton kernels") -> None:
        """Treat the values of `tensor` as unknown: a skipped kernel had it as an argument, and may have written it."""
        self.assume(_NOT_LAUNCHED.format(by))
        self.forget_values(tensor)

    def forget_values(self, tensor: torch.Tensor) -> None:
        """Forget the known values of `tensor`."""
        self.values.store.drop(tensor.untyped_storage()._cdata)

    def allocate_permanent_workspace(self, num_bytes: int, name: str) -> None:
        """Allocate `num_bytes` on the current GPU for a library's workspace, which is never freed."""
        if self.dispatch_mode.workspaces:
            site = self.recorder.attribution.find_call_site(sys._getframe(1))
            self.recorder.storages.allocate_without_tensor(num_bytes, name, site, self.gpus.get_name())

    def record_rank(self, rank: RankFacts) -> None:
        """Record the rank with which the program has joined a process group."""
        self.recorder.owners.start_naming_communication()
        if rank.world_size > 1:
            trace = self.recorder.trace
            trace.facts = dataclasses.replace(trace.facts, rank=rank)

    def used_bytes(self, device: str) -> int:
        """Return the bytes in use on a GPU, as nvidia-smi shows them."""
        fixed_bytes = self.options.context_bytes + self.outside_torch_bytes
        return fixed_bytes + self.memory.get_statistics(device).stats()["reserved_bytes.all.current"]
