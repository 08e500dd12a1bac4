"""The typed document of a report, for many renderers, under the names of its JSON.

All sizes are integer bytes. An unknown value is None, and `assumptions` has the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.allocator import Settings
from memprof.findings import Evidence, Finding
from memprof.findings.exhaustion import Growth
from memprof.ledger.batches import Batches, BatchStep, ReservedOverSteps, batches
from memprof.ledger.bridge import Bridge, libraries_bytes
from memprof.ledger.caught_errors import CaughtError, caught_errors
from memprof.ledger.ledger import Ledger, LiveTensor, Row
from memprof.ledger.over_time import OverTime
from memprof.ledger.stage_amounts import OutOfMemoryMoment, Stage
from memprof.ledger.state import ModelState, model_state
from memprof.ledger.steps import TrainingStep, training_steps
from memprof.ledger.streams import StreamMemory
from memprof.ledger.workspaces import Workspaces
from memprof.report.documents.base import DisplayedDocument
from memprof.report.documents.ladder import Rung
from memprof.report.documents.limit import Limit
from memprof.report.documents.ranks import GpuRow, RankRow
from memprof.report.frames import RowTable
from memprof.trace.events import CPU, FailureKind, PhaseKind, Trace
from memprof.trace.facts import AllocatorFacts, DeviceFacts, ProgramFacts, RankFacts, Target, target_to_json
from memprof.trace.json_values import json_name
from memprof.units import format_bytes

_LENT = (
    "What other streams borrowed (Tensor.record_stream) is free again once the host or another stream has been made to "
    "wait for them, or a phase of the run has ended; in a real run that is a matter of time."
)
_OUTSIDE = (
    "What libraries take outside the allocator and beyond the context (handles of cuBLAS and cuDNN, NCCL), and other "
    "processes on the GPU, are not known and not in device used."
)
# 2: reserved memory is replayed, `allocated` is of whole blocks, the verdict tests what is reserved.
# 3: names (old_names.py).
SCHEMA = 3


@dataclass(frozen=True, slots=True)
class Peak:
    """The allocated peak; and the reserved peak, which may be at another moment."""

    stage: str
    step: int
    micro_batch: int
    allocated_bytes: int
    reserved_bytes: int  # The reserved peak of the run, first reached in `reserved_stage` of `reserved_step`.
    reserved_stage: str
    reserved_step: int
    reserved_micro_batch: int
    device_used_bytes: int  # The peak of device memory: reserved and the CUDA context.
    # In host memory at this moment; `host_peak_bytes` of the document is the highest of the whole run.
    host_allocated_bytes: int
    categories: dict[str, int]
    tensors: tuple[LiveTensor, ...]
    rows: tuple[Row, ...]  # They sum to `allocated_bytes`.
    workspaces: Workspaces | None = None  # None: no convolution of cuDNN's ran, or the run was measured.


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run: whether it fits the GPU, where it runs out of memory if not, and its need."""

    # None if the run failed, or was stopped, before it was known. Of a program that caught out-of-memory errors:
    # whether what it did instead fits.
    fits: bool | None
    oom_stage: str | None
    oom_step: int | None
    oom_op: str | None
    oom_module: str | None
    oom_shape: tuple[int, ...] | None
    oom_dtype: str | None
    oom_source: str | None  # `file:line function`.
    oom_message: str | None  # The message of that release of torch.
    tried_to_allocate_bytes: int | None  # The segment that the driver refuses: as a rule a little more than the tensor.
    in_use_bytes: int | None  # Allocated then.
    reserved_bytes: int | None  # Reserved then; what is more than in use is free, and of no use to this request.
    free_bytes: int | None  # Free on the GPU then.
    retries: int  # Times that an allocation succeeded only after the allocator's cache was released.
    # Of device memory, so that nothing is ever refused: the most that is reserved on a GPU without limit, and the CUDA
    # context. What a program was refused and went on without is not in it.
    required_bytes: int
    out_of_memory_caught: int = 0  # Out-of-memory errors that the program caught.
    first_caught: CaughtError | None = None  # The first of them.
    # Memory that training steps leave behind; None: none, or it ran out already. `fits` is False where the program goes
    # on for longer than that lasts.
    growth: Growth | None = None
    # So much more was held in host memory than `--host-memory` has; 0 too where it was not given.
    host_over_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FailureRow:
    """The error that ended the run early: the document covers the run until then."""

    kind: str
    phase: str
    error: str
    message: str
    op: str | None
    module: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(DisplayedDocument):
    """The report on one run: figures, findings and fixes; all amounts are bytes."""

    schema: int
    memprof_version: str
    command: str
    source: str
    target: Target | None  # None (in JSON an empty object): not from `memprof profile`.
    program: ProgramFacts | None  # Of `memprof run`.
    device: DeviceFacts
    allocator: AllocatorFacts  # Release and settings.
    stages: tuple[Stage, ...]
    peak: Peak
    host_peak_bytes: int
    # From what tensors requested to what the GPU has in use; None where there is no GPU.
    bridge: Bridge | None = None
    model_state: ModelState | None = None  # None: a report of an early release.
    findings: tuple[Finding, ...]
    ladder: tuple[Rung, ...]  # Runs with fixes, if requested.
    verdict: Verdict
    assumptions: tuple[str, ...]
    failure: FailureRow | None = None  # The error that ended the run early; None if it completed.
    ladder_reason: str = ""  # Why the ladder's fixes were chosen, for `--fix auto`.
    ladder_left_out: dict[str, str] = field(default_factory=dict)  # Fix -> why it has no row.
    batches: Batches | None = None  # Of a run whose lengths vary (`--lengths`), and of a program whose steps differ.
    # Of a program that names no phases of its own, if two or more of its steps ended.
    steps: tuple[TrainingStep, ...] = ()
    # Of a run that had several GPUs in one process: the one that all but the verdict and the findings is about.
    gpu: str = ""
    gpus: tuple[GpuRow, ...] = ()  # Of such a run, a row each; in JSON both are left out of other documents.
    # What was searched for (`--largest`); all but this is of the run at the largest number that fits, or at the least
    # if none does. In JSON it is left out where nothing was.
    limit: Limit | None = None
    # Of a program of several processes, which of them it was; in JSON left out of other documents.
    rank: RankFacts | None = None
    # Of a program whose ranks ran together, a row each; all but the verdict and the findings is about `rank`.
    ranks: tuple[RankRow, ...] = ()
    # Of a run that took memory on several streams; left out of other documents in JSON.
    streams: StreamMemory | None = None
    # By category at a hundred moments; left out where there is none, as in reports of earlier releases.
    over_time: OverTime | None = None
    # What it was made of, for pictures of every moment; None: of JSON, or of a run of which totals were asked.
    ledger: Ledger | None = field(default=None, compare=False, metadata=json_name(None))

    @property
    def on_cpu(self) -> bool:
        """Return whether the run was measured on a CPU, where there is neither CUDA context nor allocator's cache."""
        is_old = self.model_state is None  # these have no bridge either
        asked = None if self.target is None else self.target.asked.device
        return self.source == "measured" and (asked == "cpu" if is_old else self.bridge is None)

    def plot(self, kind: str = "timeline") -> Any:
        """Return a plotly figure (`memprof[html]`): memory over the run, a treemap of the peak, or the fixes.

        Args:
            kind: `timeline`, `treemap` or `ladder`.

        Raises:
            UsageError: no such figure, or the report lacks its data: a report from JSON has no moments.
        """
        from memprof.report.page.figures import figure

        return figure(kind, self.ledger, self.device, self.ladder)

    def tables(self) -> dict[str, RowTable]:
        """Return the tables of the report: stages, peak, findings and others."""
        batches = self.batches
        evidence = ((finding.id, one) for finding in self.findings for one in finding.evidence)
        return {
            "stages": RowTable(self.stages, Stage),
            "steps": RowTable(self.steps, TrainingStep),
            "batches": RowTable(batches.steps if batches else (), BatchStep),
            "reserved": RowTable(batches.reserved if batches else (), ReservedOverSteps),
            "categories": RowTable(self.peak.categories.items(), before={"category": str, "bytes": int}),
            "tensors": RowTable(self.peak.tensors, LiveTensor),
            "ledger": RowTable(self.peak.rows, Row),
            "findings": RowTable(self.findings, Finding),
            "evidence": RowTable(evidence, Evidence, {"finding": str}),
            "ladder": RowTable(self.ladder, Rung),
            **({"gpus": RowTable(self.gpus, GpuRow)} if self.gpus else {}),
            **({"ranks": RowTable(self.ranks, RankRow)} if self.ranks else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the document as plain JSON values (docs/json.md lists the names)."""
        plain = super(Report, self).to_json() | {"target": target_to_json(self.target)}
        optional = ("gpus", "limit", "rank", "ranks", "streams", "over_time")
        absent = {name for name in optional if not getattr(self, name)} | ({"gpu"} if not self.gpus else set())
        if self.bridge is not None and self.bridge.nccl_group_bytes is None:
            del plain["bridge"]["nccl_group_bytes"]
        if self.rank is not None:
            plain["rank"] = {name: value for name, value in plain["rank"].items() if value or name not in _NOT_OF_ALL}
        return {name: plain[name] for name in plain if name not in absent}


_NOT_OF_ALL = ("alike", "without_nccl")  # Left out of JSON if empty.


def build_document(
    ledger: Ledger,
    findings: list[Finding],
    settings: Settings,
    bridge: Bridge | None = None,
    streams: StreamMemory | None = None,
    growth: Growth | None = None,
) -> Report:
    """Return the report on a ledger; `settings` are those of its replay, the other arguments belong to the ledger."""
    trace = ledger.trace
    facts = trace.facts
    context, host = facts.device.context_bytes, facts.device.host_memory_bytes
    beside_torch = context + (libraries_bytes(trace) or 0)
    on_cpu = trace.device == CPU
    first = Stage("context", 0, 0, device_used_bytes=context if trace.source == "simulated" else None)
    peak, reserved = ledger.peak_stage, ledger.peak_reserved_stage
    steps = () if facts.command == "profile" else tuple(training_steps(trace, ledger.allocated))
    return Report(
        schema=SCHEMA,
        memprof_version=facts.memprof_version,
        command=facts.command,
        source=trace.source,
        target=facts.target,
        program=facts.program,
        device=facts.device,
        allocator=settings.facts,
        stages=(*(() if on_cpu else (first,)), *ledger.stages),
        peak=Peak(
            stage=peak.name,
            step=peak.step,
            micro_batch=peak.micro_batch,
            allocated_bytes=ledger.peak_bytes,
            reserved_bytes=ledger.peak_reserved_bytes,
            reserved_stage=reserved.name,
            reserved_step=reserved.step,
            reserved_micro_batch=reserved.micro_batch,
            device_used_bytes=ledger.peak_reserved_bytes + beside_torch,
            host_allocated_bytes=ledger.host[ledger.peak_event],
            categories={category.value: num_bytes for category, num_bytes in ledger.by_category().items()},
            tensors=tuple(ledger.live),
            rows=tuple(ledger.rows),
            workspaces=Workspaces.of(trace, ledger.allocated, ledger.peak_event, ledger.run.refused),
        ),
        host_peak_bytes=ledger.host_peak_bytes,
        bridge=bridge,
        model_state=model_state(trace),
        findings=tuple(findings),
        ladder=(),
        verdict=_build_verdict(ledger, beside_torch, growth),
        assumptions=(
            *trace.assumptions,
            *(() if host is None else (f"The machine has {format_bytes(host)} of host memory (--host-memory).",)),
            *(() if on_cpu else _gpu_assumptions(ledger, settings, context)),
            *((_OUTSIDE,) if bridge is not None and bridge.outside_is_unknown else ()),
            *(() if ledger.run.bounds is None else (_LENT,)),
        ),
        failure=None if trace.failure is None else FailureRow(trace.failure.kind.value, *trace.failure[1:7]),
        batches=None if trace.failure else batches(ledger.run, ledger.allocated, steps),
        steps=() if len(steps) < 2 else steps,
        rank=facts.rank,
        streams=streams,
    )


def _judge_fit(trace: Trace, oom: OutOfMemoryMoment | None, host_over_bytes: int, growth: Growth | None) -> bool | None:
    """Return False also if a measured run ran out of memory, growth will, or host memory does not suffice."""
    failure = trace.failure
    runs_out = growth is not None and growth.runs_out and failure is None
    if oom or host_over_bytes or runs_out or (failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY):
        return False
    return None if failure or _is_stopped_early(trace) else True


def _is_stopped_early(trace: Trace) -> bool:
    """Return whether --timeout ended a script before a training step or, if it does not train, before a model ran."""
    program = trace.facts.program
    if program is None or program.ended != "timeout":
        return False
    kinds = [phase.kind for phase in trace.phases]
    trains = trace.trains or PhaseKind.BACKWARD in kinds or PhaseKind.EVALUATION in kinds
    # The last phase has not ended.
    ended = PhaseKind.OPTIMIZER_STEP in kinds[:-1] or any(phase.step > 1 for phase in trace.phases)
    return not ended and (trains or not trace.forwards)


def _gpu_assumptions(ledger: Ledger, settings: Settings, context: int) -> tuple[str, ...]:
    seen = ledger.trace.facts.nvml
    known = seen is not None and seen.process_bytes is not None
    whence = "as NVML says of this process" if known else "measured on one GPU; it varies by GPU and driver"
    beyond = "; after the request that the GPU refuses, as on a GPU without limit." if ledger.out_of_memory else "."
    return (
        f"The CUDA context takes {context >> 20} MiB ({whence}).",
        f"Reserved memory is that of the caching allocator of {settings}, replayed request by request{beyond}",
    )


def _build_verdict(ledger: Ledger, beside_torch: int, growth: Growth | None) -> Verdict:
    trace, oom, run = ledger.trace, ledger.out_of_memory, ledger.run
    storage = trace.storages[oom.storage] if oom else None
    caught = caught_errors(ledger)
    host_limit = trace.facts.device.host_memory_bytes
    host_over = 0 if host_limit is None else max(ledger.host_peak_bytes - host_limit, 0)
    return Verdict(
        fits=_judge_fit(trace, oom, host_over, growth),
        oom_stage=oom.stage.name if oom else None,
        oom_step=oom.stage.step if oom else None,
        oom_op=trace.op(storage) if storage else None,
        oom_module=trace.module_path(storage) if storage else None,
        oom_shape=storage.shape if storage else None,
        oom_dtype=storage.dtype if storage else None,
        oom_source=trace.source_line(storage) if storage else None,
        oom_message=oom.message if oom else None,
        tried_to_allocate_bytes=oom.tried_bytes if oom else None,
        in_use_bytes=oom.in_use_bytes if oom else None,
        reserved_bytes=oom.reserved_bytes if oom else None,
        free_bytes=oom.free_bytes if oom else None,
        retries=run.retries,
        required_bytes=run.required_reserved_bytes + beside_torch,
        out_of_memory_caught=len(caught),
        first_caught=caught[0] if caught else None,
        growth=growth,
        host_over_bytes=host_over,
    )
