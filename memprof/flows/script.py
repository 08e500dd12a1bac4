"""The flow of `memprof run`: a user's unmodified script on a virtual GPU, or measured on a real device.

    Program -script/capture-> Trace, ScriptOutcome -account-> Report

After the capture, the flow is that of `memprof profile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.allocator import CurrentSettings, Settings
from memprof.command_line import make_run_command
from memprof.device.catalog import Gpu
from memprof.flows.account import analyze
from memprof.flows.gpus import (
    RunAllocator,
    find_spec_gpu,
    make_device_facts,
    read_device_facts,
    resolve_settings,
    resolve_spec_settings,
)
from memprof.flows.hub_errors import suggest_folder
from memprof.flows.recommend.engine import advise_engine
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, ScriptOutcome, StopRule
from memprof.script.launchers import ProcessSelection, ProcessStart, find_missing_variable
from memprof.serving.budget import EngineBudget
from memprof.trace.events import PhaseKind, Trace
from memprof.trace.facts import ProgramFacts, RankFacts

if TYPE_CHECKING:
    from memprof.virtual.peers.channel import Channel

OOM_END_NOTE = (
    "The script ended where the GPU was full: what it would need after that was not seen (--beyond goes on past it)."
)


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a script's run; the document is None if nothing was allocated on the GPU."""

    trace: Trace
    outcome: ScriptOutcome
    document: Report | None


def run_script(program: Program, rule: StopRule, spec: RunSpec) -> DryRun:
    """Run `program` until `rule` stops it, in this process; `spec.ranks` is ignored (see `run_ranks`).

    Raises UsageError: the script does not exist, or a fix cannot be switched on from outside.
    """
    program.check()
    start: ProcessStart | None = None
    if spec.device == "virtual":
        process = resolve_process(program, ProcessSelection(spec.rank, spec.gpus, spec.nodes), find_spec_gpu(spec))
        if isinstance(process, ScriptOutcome):
            return DryRun(Trace(), process, None)
        start = process
    trace, outcome = capture_run(program, rule, spec, start=start)
    document = None
    with contextlib.suppress(EmptyTraceError):
        document = add_engine(analyze(trace, gpu=spec.shown_gpu), outcome.engine)
    return DryRun(trace, outcome, document)


def add_engine(document: Report, engine: EngineBudget | None) -> Report:
    """Return `document` with the budget of the inference engine that the script has started, if any, and with what to
    change if it does not start."""
    if engine is None:
        return document
    advised = advise_engine(engine)
    return dataclasses.replace(
        document, engine=dataclasses.replace(advised, assumptions=(*document.assumptions, *advised.assumptions))
    )


def resolve_process(program: Program, selection: ProcessSelection, gpu: Gpu) -> ProcessStart | ScriptOutcome:
    """Return the selected process of `program`, or the outcome if its launcher ends by itself (`--help`).
    Raises UsageError if the rank does not exist, or there are too few GPUs. Only a launcher needs torch for it.
    """
    if not program.has_launcher:
        return program.start(selection)
    from memprof.stubs.extension import extensions
    from memprof.virtual import VirtualGpu

    with VirtualGpu(gpu, gpus=selection.gpus or 1, extensions=extensions()):
        return program.start(selection)


def capture_run(
    program: Program,
    rule: StopRule,
    spec: RunSpec,
    *,
    start: ProcessStart | None = None,
    channel: Channel | None = None,
) -> tuple[Trace, ScriptOutcome]:
    """Run one process of `program`; return its trace and outcome. `start` is the process that a launcher would start
    (None: the program itself); `channel` connects to the other ranks, if several run together."""
    from memprof.fixes.catalog import check_device
    from memprof.fixes.chosen import parse_fixes
    from memprof.fixes.script_fixes import ScriptFixes
    from memprof.measured import MeasuredDevice
    from memprof.measured.cuda import NvmlUse
    from memprof.script.capture import capture_script
    from memprof.stubs.extension import extensions
    from memprof.virtual import VirtualGpu

    gpu, is_virtual = find_spec_gpu(spec), spec.device == "virtual"
    device: VirtualGpu | MeasuredDevice
    settings = _LateSettings(spec)
    if is_virtual and spec.fixes:
        check_device([chosen.fix for chosen in parse_fixes(",".join(spec.fixes))], gpu)
    script_fixes = ScriptFixes(spec.fixes)
    settings.add_fix_settings(script_fixes.alloc_conf)
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
            # Custom kernels write to existing tensors: their callers allocate.
            skips_kernels=True,
            allocator_settings=settings,
            raises_oom=not spec.beyond,
            compiles=not spec.no_compile,
            release=settings.now.release.version,
            extensions=extensions(stubs=not spec.no_stubs),
        )
    else:
        device_facts = read_device_facts(spec.device)
        device = MeasuredDevice(spec.device, NvmlUse() if spec.device == "cuda" else None, detail=spec.detail)
    trace, outcome = capture_script(
        program, device, rule, script_fixes.before_forward, worst_batch=spec.worst_batch, start=start, channel=channel
    )
    if trace.failure is not None:
        hint = _suggest_torchrun(program, spec, outcome) or suggest_folder(outcome.error)
        trace.failure = trace.failure._replace(hint=hint or trace.failure.hint)
    if outcome.ended is EndReason.REFUSED and is_virtual and (outcome.engine is None or outcome.engine.starts):
        trace.assumptions.append(OOM_END_NOTE)
    if not trace.may_train or (outcome.ended is EndReason.EXIT and not _list_backward_steps(trace)):
        trace.trains = False  # gradients were on, and no backward ran
    rank_facts = trace.facts.rank
    if channel is not None:
        rank_facts = dataclasses.replace(rank_facts or RankFacts(), rank=channel.rank, world_size=channel.size)
    if is_virtual:  # after the run, for the script may set the limit of MPS
        device_facts = make_device_facts(gpu, config=settings.read().config)
    trace.facts = dataclasses.replace(
        trace.facts,
        command="run",
        program=ProgramFacts(
            tuple(program.command),
            outcome.ended.value,
            outcome.exit_code,
            _count_training_steps(trace, outcome.ended),
            spec.fixes,
            any(not forward.training for forward in trace.forwards),
            spec,
            outcome.planned_steps,
            outcome.misses_evaluation,
            outcome.misses_unfreezing,
            outcome.idle_optimizers,
            outcome.misses_model,
            outcome.evaluation_step,
            outcome.misses_calls,
        ),
        device=dataclasses.replace(device_facts, host_memory_bytes=spec.host_memory_bytes),
        allocator=settings.read().facts,
        rank=rank_facts,
    )
    return trace, outcome


def _suggest_torchrun(program: Program, spec: RunSpec, outcome: ScriptOutcome) -> str:
    """Return a hint to use torchrun, if the script failed because a launcher's variable is not set; else empty."""
    variable = find_missing_variable(outcome.error)
    if not variable or program.has_launcher:
        return ""
    nodes = () if spec.nodes in (None, 1) else ("--nnodes", str(spec.nodes))
    torchrun_command = ("torchrun", *nodes, "--nproc-per-node", str(spec.gpus or 1), *program.command)
    command = make_run_command(spec.edit(gpus=None, nodes=None), torchrun_command)
    return f"start it with torchrun, which sets {variable}: {command}"


def _count_training_steps(trace: Trace, end_reason: EndReason) -> int:
    """Return the number of training steps begun; forwards without any backward do not count as training."""
    trained_steps = _list_backward_steps(trace)
    if trained_steps and end_reason is EndReason.EXIT:
        return max(trained_steps)  # later forwards have no backward
    return max((phase.step for phase in trace.phases), default=0) if trained_steps or trace.trains else 0


def _list_backward_steps(trace: Trace) -> list[int]:
    """Return the step number of each backward phase and optimizer phase."""
    kinds = (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)
    return [phase.step for phase in trace.phases if phase.kind in kinds]


class _LateSettings(CurrentSettings):
    """Allocator settings of a script, which may set PYTORCH_CUDA_ALLOC_CONF until its first allocation."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(resolve_spec_settings(spec))
        self._torch_release, self._backend = spec.torch_release, find_spec_gpu(spec).backend
        self._is_unread = spec.alloc_conf is None
        self._fix_settings = ""
        self._environment = dict(os.environ)

    def add_fix_settings(self, alloc_conf: str) -> None:
        """Add the allocator settings `alloc_conf` of a fix."""
        self._fix_settings = alloc_conf
        if alloc_conf:
            self.set(self.get())

    def set(self, alloc_conf: str) -> None:
        """Replace the settings by `alloc_conf`, as torch does at run time, and keep the settings of a fix."""
        self._is_unread = False
        super().set(",".join(filter(None, (alloc_conf, self._fix_settings))))

    def read(self) -> Settings:
        """Return the current settings; the first call fixes the settings that the environment gives."""
        if self._is_unread and dict(os.environ) != self._environment:
            self.now = resolve_settings(None, self._torch_release, backend=self._backend)
            if self._fix_settings:
                super().set(",".join(filter(None, (self.get(), self._fix_settings))))
        self._is_unread = False
        return self.now
