"""The dry run: a user's script, unmodified, on a virtual GPU or measured on a real device.

    Program -script/capture-> Trace, ScriptOutcome -account-> Document

Everything after the capture is as for `memprof profile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.allocator import CurrentSettings, Settings
from memprof.command_line import run_command
from memprof.flows.account import analyze
from memprof.flows.gpus import RunAllocator, allocator_settings, device_facts, find_gpu_of, measured_device_facts
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, ScriptOutcome, StopRule
from memprof.trace.events import PhaseKind, Trace
from memprof.trace.facts import ProgramFacts, RankFacts

if TYPE_CHECKING:
    from memprof.script.launchers import ProcessStart
    from memprof.virtual.peers.channel import Channel

BEYOND = (
    "The script ended where the GPU was full: what it would need after that was not seen (--beyond goes on past it)."
)


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a script's run; it has no report if nothing was ever on the GPU."""

    trace: Trace
    outcome: ScriptOutcome
    document: Report | None


def run_script(program: Program, rule: StopRule, spec: RunSpec) -> DryRun:
    """Run `program` until `rule` stops it, in this process; `spec` is everything else but `ranks` (see `run_ranks`).

    Raises UsageError if there is no such script, or a fix cannot be switched on from outside.
    """
    from memprof.script.capture import resolve_process  # here and not above: --help needs no torch
    from memprof.script.launchers import ProcessSelection

    program.check()
    start: ProcessStart | None = None
    if spec.device == "virtual":
        found = resolve_process(program, ProcessSelection(spec.rank, spec.gpus, spec.nodes), find_gpu_of(spec))
        if isinstance(found, ScriptOutcome):
            return DryRun(Trace(), found, None)
        start = found
    trace, outcome = capture_run(program, rule, spec, start=start)
    document = None
    with contextlib.suppress(EmptyTraceError):
        document = analyze(trace, gpu=spec.shown_gpu)
    return DryRun(trace, outcome, document)


def capture_run(
    program: Program,
    rule: StopRule,
    spec: RunSpec,
    *,
    start: ProcessStart | None = None,
    channel: Channel | None = None,
) -> tuple[Trace, ScriptOutcome]:
    """Run one process of `program`; return what it did, with what is known of it. Without `start`, it is that which the
    program is by itself; `channel` leads to the others that run together with it, if any do."""
    from memprof.fixes.script_fixes import ScriptFixes
    from memprof.measured import MeasuredDevice
    from memprof.measured.cuda import NvmlUse
    from memprof.script.capture import capture_script
    from memprof.stubs.extension import extensions
    from memprof.virtual import VirtualGpu

    gpu, is_virtual = find_gpu_of(spec), spec.device == "virtual"
    device: VirtualGpu | MeasuredDevice
    settings = _LateSettings(spec.alloc_conf)
    switch = ScriptFixes(spec.fixes)
    settings.add(switch.alloc_conf)
    if is_virtual:
        assert start is not None
        device = VirtualGpu(
            gpu,
            gpus=start.gpus,
            nodes=start.nodes,
            rank=start.rank,
            channel=channel,
            context_bytes=gpu.context_bytes,
            memory=lambda trace: RunAllocator(trace, gpu, settings.read()),
            # Kernels write tensors that they are given: memory is their callers' to ask for.
            passes_kernels=True,
            allocator_settings=settings,
            refuses=not spec.beyond,
            compiles=not spec.no_compile,
            extensions=extensions(stubs=not spec.no_stubs),
        )
        facts = device_facts(gpu)
    else:
        facts = measured_device_facts(spec.device)
        device = MeasuredDevice(spec.device, NvmlUse() if spec.device == "cuda" else None, detail=spec.detail)
    trace, outcome = capture_script(
        program, device, rule, switch.before_forward, worst_batch=spec.worst_batch, start=start, channel=channel
    )
    if trace.failure is not None:
        trace.failure = trace.failure._replace(hint=_launch_hint(program, spec, outcome) or trace.failure.hint)
    if outcome.ended is EndReason.REFUSED and is_virtual:
        trace.assumptions.append(BEYOND)
    if outcome.ended is EndReason.EXIT and not _learned(trace):
        trace.trains = False  # gradients were on, and nobody ever requested any
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
            spec.fixes,
            any(not forward.training for forward in trace.forwards),
            spec,
            outcome.planned_steps,
        ),
        device=dataclasses.replace(facts, host_memory_bytes=spec.host_memory_bytes),
        allocator=settings.read().facts,
        rank=found,
    )
    return trace, outcome


def _launch_hint(program: Program, spec: RunSpec, outcome: ScriptOutcome) -> str:
    """Return how a script is started that looks for what a launcher tells it; empty if it was not for lack of that."""
    from memprof.script.launchers import find_missing_variable

    variable = find_missing_variable(outcome.error)
    if not variable or program.has_launcher:
        return ""
    nodes = () if spec.nodes in (None, 1) else ("--nnodes", str(spec.nodes))
    launched = ("torchrun", *nodes, "--nproc-per-node", str(spec.gpus or 1), *program.command)
    command = run_command(spec.edit(gpus=None, nodes=None), launched)
    return f"start it with torchrun, which sets {variable}: {command}"


def _training_steps(trace: Trace, ended: EndReason) -> int:
    """Return how many were begun; calls of a model without a backward are no training, whatever their step."""
    learned = _learned(trace)
    if learned and ended is EndReason.EXIT:
        return max(learned)  # what it called after the last was for its output alone, with gradients or without
    return max((phase.step for phase in trace.phases), default=0) if learned or trace.trains else 0


def _learned(trace: Trace) -> list[int]:
    """Return the steps with a backward or an optimizer step."""
    learns = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)
    return [phase.step for phase in trace.phases if phase.kind in learns]


class _LateSettings(CurrentSettings):
    """The allocator's settings as torch finds them: a script may set the environment's before it first uses memory."""

    def __init__(self, alloc_conf: str | None) -> None:
        super().__init__(allocator_settings(alloc_conf))
        self._late = alloc_conf is None
        self._added = ""
        self._environment = dict(os.environ)

    def add(self, alloc_conf: str) -> None:
        """Add settings of a fix to the others."""
        self._added = alloc_conf
        if alloc_conf:
            self.set(self.get())

    def set(self, alloc_conf: str) -> None:
        """Take settings as torch does."""
        self._late = False
        super().set(",".join(filter(None, (alloc_conf, self._added))))

    def read(self) -> Settings:
        """Return what holds from here on."""
        if self._late and dict(os.environ) != self._environment:
            self.now = allocator_settings(None)
            if self._added:
                super().set(",".join(filter(None, (self.get(), self._added))))
        self._late = False
        return self.now
