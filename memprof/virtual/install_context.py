"""What the parts of a virtual GPU are given of a run when they are put in place."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memprof.catalog import Gpu
from memprof.patching.patch_set import PatchSet
from memprof.torch_private.check import refuse_missing
from memprof.trace.events import Trace
from memprof.trace.facts import RankFacts
from memprof.virtual.card import Card
from memprof.virtual.cards import Cards
from memprof.virtual.devices import FunctionMode
from memprof.virtual.edges.children import Children
from memprof.virtual.kernels import registry
from memprof.virtual.limits import Note
from memprof.virtual.ranks.alone import Alone
from memprof.virtual.ranks.channel import Channel
from memprof.virtual.ranks.together import Together
from memprof.virtual.torch_cuda.memory import (
    AllocatorSettings,
    Memory,
    MemoryStatistics,
    SettingsOfRun,
    UnusedSettings,
)
from memprof.virtual.tracker import DispatchMode
from memprof.virtual.values import Values
from memprof.watch.recorder import Recorder

_NOT_LAUNCHED = "{} are not launched: what they write is unknown, and they allocate nothing."


@dataclass
class InstallContext:
    """A run on a virtual GPU, as extensions see it (memprof/patching/extension.py).

    Attributes:
        gpu: the model of each GPU.
        cards: how many there are, and which is current.
        nodes: machines with so many.
        rank: which of them this process is where the program starts them itself.
        channel: to the ranks that run together with this one; None: it is alone.
        others: what the other ranks contribute.
        tracker: the dispatch mode.
        function_mode: the function mode.
        memory: what answers questions about memory.
        settings: of the caching allocator.
        context_bytes: what the CUDA context takes.
        passes_kernels: whether kernels that only write tensors that they are given are passed over; False: they end
            the run.
        compiles: whether torch.compile compiles for the GPU.
        assume: told what the run rests on.
        refused: told what the program is refused: the problem, what to do instead, and the line.
        leave_in_child: called in a process that is forked in the run.
        run_patches: set until the run ends.
        children: processes that the program starts.
    """

    gpu: Gpu
    cards: Cards
    nodes: int
    rank: int
    channel: Channel | None
    others: Alone
    tracker: DispatchMode
    function_mode: FunctionMode
    memory: Memory
    settings: AllocatorSettings
    context_bytes: int
    passes_kernels: bool
    compiles: bool
    assume: Callable[[str], None]
    refused: Note
    leave_in_child: Callable[[], None]
    run_patches: PatchSet
    children: Children

    @classmethod
    def build(
        cls,
        gpu: Gpu,
        recorder: Recorder,
        run_patches: PatchSet,
        assume: Callable[[str], None],
        *,
        number_of_cards: int,
        channel: Channel | None,
        workspaces: bool,
        memory: Callable[[Trace], MemoryStatistics] | None,
        settings: AllocatorSettings | None,
        environment: Mapping[str, str],
        **given: Any,
    ) -> InstallContext:
        """Make what a run consists of: its GPUs, its modes, what answers for its allocator; `given` are attributes.

        Args:
            gpu: the model of each GPU.
            recorder: who writes the trace.
            run_patches: set until the run ends.
            assume: told what the run rests on.
            number_of_cards: how many GPUs this process sees.
            channel: to the ranks that run together with this one; None: it is alone.
            workspaces: whether to count what CUDA's libraries take for themselves.
            memory: makes what answers questions about memory; None: the bytes of living tensors do.
            settings: of the caching allocator; None: a text.
            environment: variables that Pythons find which the program starts.
            given: the other attributes.

        Raises:
            MemprofError: torch lacks a private name that the virtual GPU cannot do without.
        """
        refuse_missing()
        # Several GeForce cards do not read each other's memory: NVIDIA's driver has it off.
        cards = Cards(number_of_cards, recorder.trace.cards, are_peers="GeForce" not in gpu.name)
        values = Values(assume)
        tracker = DispatchMode(recorder, values, Card.of(gpu), cards, workspaces)
        tracker.function_mode = function_mode = FunctionMode(tracker, registry.composites(tracker))
        answers = Memory(recorder, memory)
        return cls(
            gpu=gpu,
            cards=cards,
            channel=channel,
            others=Alone(assume, values) if channel is None else Together(assume, values, channel),
            tracker=tracker,
            function_mode=function_mode,
            memory=answers,
            settings=SettingsOfRun(settings or UnusedSettings(), answers, recorder, assume),
            assume=assume,
            run_patches=run_patches,
            children=Children(environment),
            **given,
        )

    @property
    def recorder(self) -> Recorder:
        """Return what writes the trace."""
        return self.tracker.recorder

    @property
    def values(self) -> Values:
        """Return what is known of the numbers in tensors."""
        return self.tracker.values

    def is_on_card(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is on one of the GPUs."""
        return self.tracker.is_on_card(tensor)

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
            self.recorder.storages.allocate_hidden(num_bytes, name, place, self.cards.named())

    def note_joined(self, rank: RankFacts) -> None:
        """Note as which rank the program has joined a group."""
        self.recorder.owners.name_communication()
        if rank.world_size > 1:
            trace = self.recorder.trace
            trace.facts = dataclasses.replace(trace.facts, rank=rank)

    def used_bytes(self, device: str) -> int:
        """Return what is in use on a GPU, as nvidia-smi says it."""
        return self.context_bytes + self.memory.of(device).stats()["reserved_bytes.all.current"]
