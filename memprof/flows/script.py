"""The dry run: a user's script, unmodified, on a virtual card or measured on a real device.

    Program -script/capture-> Trace, ScriptOutcome -account-> Document

Everything after the capture is as for `memprof profile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.allocator import Settings, SettingsInForce
from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.flows.account import analyze
from memprof.flows.cards import RunAllocator, allocator_settings, device_facts, measured_device_facts
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Document
from memprof.script import Ended, Program, ScriptOutcome, StopRule
from memprof.trace.events import PhaseKind, Trace
from memprof.trace.facts import ProgramFacts, RankFacts

if TYPE_CHECKING:
    from memprof.script.launchers import Start
    from memprof.virtual.ranks.channel import Channel

BEYOND = (
    "The script ended where the card was full: what it would need after that was not seen (--beyond goes on past it)."
)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a script did; it has no report if nothing was ever on the card."""

    trace: Trace
    outcome: ScriptOutcome
    document: Document | None


def run_script(
    program: Program,
    rule: StopRule,
    *,
    gpu: Gpu,
    gpus: int | None = None,
    nodes: int | None = None,
    rank: int | None = None,
    card: int | None = None,
    device: str = "virtual",
    alloc_conf: str | None = None,
    beyond: bool = False,
    fixes: tuple[str, ...] = (),
    worst_batch: bool = False,
    detail: bool = False,
    compiles: bool = True,
    stand_ins: bool = True,
    host_memory_bytes: int | None = None,
) -> DryRun:
    """Run `program` until `rule` stops it.

    Args:
        gpus: how many such cards there are on each machine; None: one for each process that a launcher starts there.
        nodes: machines; None: as many as the launcher takes.
        rank: of a program of several processes, the one that is run; None: the first.
        card: of several, the number of the one that the report shows in full; None: the fullest.
        device: "virtual", or "cuda" or "cpu" to measure there.
        alloc_conf: settings of the caching allocator; None: those that the environment, or the script, sets.
        beyond: go on past the card's capacity, instead of raising torch.OutOfMemoryError in the script.
        fixes: remedies to switch on in the script's models, as NAME or NAME=VALUE.
        worst_batch: feed the largest batch of each data loader first.
        detail: with a measured run, the line of every allocation.
        compiles: whether torch.compile compiles on the virtual card; False: what it is given runs eagerly.
        stand_ins: whether packages that are not installed are stood in for (docs/stand-ins.md).
        host_memory_bytes: of the machine; what keeps more in it does not fit. None: it is not asked.

    Raises:
        UsageError: there is no such script, or a remedy cannot be switched on from outside.
    """
    from memprof.script.capture import ask  # here and not above: --help needs no torch
    from memprof.script.launchers import Place

    program.check()
    start: Start | None = None
    if device == "virtual":
        found = ask(program, Place(rank, gpus, nodes), gpu)
        if isinstance(found, ScriptOutcome):
            return DryRun(Trace(), found, None)
        start = found
    trace, outcome = capture_run(
        program, rule, gpu=gpu, start=start, device=device, alloc_conf=alloc_conf, beyond=beyond, fixes=fixes,
        worst_batch=worst_batch, detail=detail, host_memory_bytes=host_memory_bytes, compiles=compiles,
        stand_ins=stand_ins,
    )  # fmt: skip
    document = None
    with contextlib.suppress(EmptyTraceError):
        document = analyze(trace, card=card)
    return DryRun(trace, outcome, document)


def capture_run(
    program: Program,
    rule: StopRule,
    *,
    gpu: Gpu,
    start: Start | None = None,
    channel: Channel | None = None,
    device: str = "virtual",
    alloc_conf: str | None = None,
    beyond: bool = False,
    fixes: tuple[str, ...] = (),
    worst_batch: bool = False,
    detail: bool = False,
    host_memory_bytes: int | None = None,
    compiles: bool = True,
    stand_ins: bool = True,
) -> tuple[Trace, ScriptOutcome]:
    """What one process of `program` does, with what is known of it; the other arguments are those of `run_script`.

    Args:
        start: the process; None: that which the program is by itself.
        channel: to the others that run together with it; None: it is alone.
    """
    from memprof.measured import MeasuredDevice
    from memprof.measured.outside import Outside
    from memprof.remedies.from_outside import Switch
    from memprof.script.capture import capture_script
    from memprof.virtual import VirtualGpu

    settings = _LateSettings(alloc_conf)
    switch = Switch(fixes)
    settings.add(switch.alloc_conf)
    if device == "virtual":
        assert start is not None
        virtual = VirtualGpu(
            gpu,
            cards=start.cards,
            nodes=start.nodes,
            rank=start.rank,
            channel=channel,
            context_bytes=CONTEXT_BYTES,
            memory=lambda trace: RunAllocator(trace, gpu, settings.read()),
            # Kernels write tensors that they are given: memory is their callers' to ask for.
            passes_kernels=True,
            allocator_settings=settings,
            refuses=not beyond,
            compiles=compiles,
            stand_ins=stand_ins,
        )
        trace, outcome = capture_script(
            program, virtual, rule, switch.before_forward, worst_batch=worst_batch, start=start, channel=channel
        )
        on = device_facts(gpu)
    else:
        on = measured_device_facts(device)
        measured = MeasuredDevice(device, Outside() if device == "cuda" else None, detail=detail)
        trace, outcome = capture_script(
            program, measured, rule, switch.before_forward, worst_batch=worst_batch, start=start, channel=channel
        )
    if outcome.ended is Ended.REFUSED and device == "virtual":
        trace.assumptions.append(BEYOND)
    if outcome.ended is Ended.EXIT and not _learned(trace):
        trace.trains = False  # gradients were on, and nobody ever asked for any
    found = trace.facts.rank
    if channel is not None:
        found = dataclasses.replace(found or RankFacts(), rank=channel.rank, world_size=channel.size)
    trace.facts = dataclasses.replace(
        trace.facts,
        command="run",
        program=ProgramFacts(
            tuple(program.command),
            outcome.ended.value,
            outcome.exit_code,
            _training_steps(trace, outcome.ended),
            fixes,
            any(not forward.training for forward in trace.forwards),
        ),
        device=dataclasses.replace(on, host_memory_bytes=host_memory_bytes),
        allocator=settings.read().facts,
        rank=found,
    )
    return trace, outcome


def _training_steps(trace: Trace, ended: Ended) -> int:
    """How many were begun; calls of a model from which nothing is learned are no training, whatever step they are shown
    in."""
    learned = _learned(trace)
    if learned and ended is Ended.EXIT:
        return max(learned)  # what it called after the last was for its output alone, with gradients or without
    return max((phase.step for phase in trace.phases), default=0) if learned or trace.trains else 0


def _learned(trace: Trace) -> list[int]:
    """The steps in which there was something to learn."""
    learns = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)
    return [phase.step for phase in trace.phases if phase.kind in learns]


class _LateSettings(SettingsInForce):
    """The allocator's settings as torch finds them: the environment's when memory is first asked for, which a script
    may set in its first lines."""

    def __init__(self, alloc_conf: str | None) -> None:
        super().__init__(allocator_settings(alloc_conf))
        self._late = alloc_conf is None
        self._added = ""
        self._environment = dict(os.environ)

    def add(self, alloc_conf: str) -> None:
        """Settings of a remedy, beside the others."""
        self._added = alloc_conf
        if alloc_conf:
            self.set(self.get())

    def set(self, alloc_conf: str) -> None:
        """As torch takes them."""
        self._late = False
        super().set(",".join(filter(None, (alloc_conf, self._added))))

    def read(self) -> Settings:
        """What holds from here on."""
        if self._late and dict(os.environ) != self._environment:
            self.now = allocator_settings(None)
            if self._added:
                super().set(",".join(filter(None, (self.get(), self._added))))
        self._late = False
        return self.now
