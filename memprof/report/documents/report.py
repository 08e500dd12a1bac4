"""The report on one run, with the names of its JSON.

Sizes are bytes. An unknown value is None, and `assumptions` has the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from memprof.allocator import GpuReplay, Settings
from memprof.findings import Evidence, Finding, Severity, Suggestion
from memprof.findings.exhaustion import Growth
from memprof.ledger.batches import Batches, BatchStep, ReservedOverSteps, build_batches
from memprof.ledger.bridge import Bridge, compute_libraries_bytes
from memprof.ledger.categories import Category
from memprof.ledger.caught_errors import CaughtError, list_caught_errors
from memprof.ledger.ledger import Ledger, LiveTensor, Row
from memprof.ledger.over_time import OverTime
from memprof.ledger.stage_amounts import OutOfMemoryMoment, Stage
from memprof.ledger.state import ModelState, compute_model_state
from memprof.ledger.steps import TrainingStep, list_training_steps
from memprof.ledger.streams import StreamMemory
from memprof.ledger.workspaces import Workspaces
from memprof.report.documents.base import DisplayedDocument
from memprof.report.documents.ladder import LadderRow
from memprof.report.documents.limit import LargestSearch
from memprof.report.documents.patch import SuggestedPatch
from memprof.report.documents.ranks import GpuRow, RankRow
from memprof.report.frames import RowTable
from memprof.serving.budget import EngineBudget
from memprof.trace.events import CPU, FailureKind, PhaseKind, Trace
from memprof.trace.facts import AllocatorFacts, DeviceFacts, ProgramFacts, RankFacts, Target, target_to_json
from memprof.trace.json_values import json_name
from memprof.units import format_bytes

_BORROWED_NOTE = (
    "What other streams borrowed (Tensor.record_stream) is free again once the host or another stream has been made to "
    "wait for them, or a phase of the run has ended; in a real run that is a matter of time."
)
_OUTSIDE_NOTE = (
    "What libraries take outside the allocator and beyond the context (handles of cuBLAS and cuDNN, NCCL), and other "
    "processes on the GPU, are not known and not in device used."
)
# 2: reserved memory is replayed, `allocated` is of whole blocks, the verdict tests what is reserved.
# 3: names (old_names.py).
SCHEMA = 3


@dataclass(frozen=True, slots=True)
class Peak:
    """The allocated peak of a run, and the reserved peak, which may be at another moment."""

    stage: str
    step: int
    micro_batch: int
    allocated_bytes: int
    reserved_bytes: int  # The reserved peak of the run, first reached in `reserved_stage` of `reserved_step`.
    reserved_stage: str
    reserved_step: int
    reserved_micro_batch: int
    device_used_bytes: int  # Peak of device memory: reserved bytes, the CUDA context and libraries.
    # Host memory at the allocated peak; `host_peak_bytes` of the report is the maximum of the run.
    host_allocated_bytes: int
    categories: dict[str, int]
    tensors: tuple[LiveTensor, ...]
    rows: tuple[Row, ...]  # Their bytes sum to `allocated_bytes`.
    workspaces: Workspaces | None = None  # Of cuDNN's convolutions; None: there were none, or the run was measured.
    # What keeps the tensors of the run's causes, by name: its bytes of each category.
    culprits: dict[str, dict[str, int]] = field(default_factory=dict, metadata=json_name(None))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run: whether it fits the GPU, the memory that it needs, and the failed allocation, if any."""

    # None if the run failed, or was stopped, too early to tell. A program that caught out-of-memory errors fits if it
    # goes on without the failed allocations.
    fits: bool | None
    oom_stage: str | None
    oom_step: int | None
    oom_op: str | None
    oom_module: str | None
    oom_shape: tuple[int, ...] | None
    oom_dtype: str | None
    oom_source: str | None  # `file:line function`.
    oom_message: str | None  # The message of that release of torch.
    tried_to_allocate_bytes: int | None  # Size of the segment that the driver refuses: usually more than the tensor.
    in_use_bytes: int | None  # Allocated bytes at the failed allocation.
    reserved_bytes: int | None  # Reserved bytes at the failed allocation.
    free_bytes: int | None  # Free device memory at the failed allocation.
    retries: int  # Times that an allocation succeeded only after the allocator's cache was released.
    # Device memory with which no allocation fails: maximum reserved bytes on a GPU without limit, and the CUDA context.
    # Failed allocations that a program caught do not count. Of a run that memory ended: at least so much, what was
    # reserved there beside the request.
    required_bytes: int
    out_of_memory_caught: int = 0  # Out-of-memory errors that the program caught.
    first_caught: CaughtError | None = None  # The first caught out-of-memory error.
    # Memory that training steps leave behind; None: none, or the run is out of memory. If it fills the GPU before the
    # program ends, `fits` is False.
    growth: Growth | None = None
    # Peak of host memory beyond `--host-memory`; 0 if the option is not set.
    host_over_bytes: int = 0
    oom_callers: tuple[str, ...] = ()  # Lines of the program that led to `oom_source`, innermost first.
    # Whether expandable segments, which torch's message advises, would let the failed allocation of a run that ended
    # there succeed; None: nothing to advise.
    expandable_segments_help: bool | None = None
    # Of MPS: the length of Metal's buffers, if the failed allocation is one tensor that reaches it; else None.
    max_buffer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FailureRow:
    """The error that ended a run early; the report covers the run until then."""

    kind: str
    phase: str
    error: str
    message: str
    op: str | None
    module: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(DisplayedDocument):
    """The report on one run: stages, peaks, verdict, findings and fixes; sizes are bytes."""

    schema: int
    memprof_version: str
    command: str
    source: str
    target: Target | None  # The options of `memprof profile`; None (in JSON {}): another command.
    program: ProgramFacts | None  # The script of `memprof run`; None: another command.
    device: DeviceFacts
    allocator: AllocatorFacts  # Release of torch, and allocator settings.
    stages: tuple[Stage, ...]
    peak: Peak
    host_peak_bytes: int
    # From bytes requested by tensors to device memory used; None: the run was on a CPU.
    bridge: Bridge | None = None
    model_state: ModelState | None = None  # None: a report of an early memprof release.
    findings: tuple[Finding, ...]
    ladder: tuple[LadderRow, ...]  # Runs with fixes, if requested.
    verdict: Verdict
    assumptions: tuple[str, ...]
    failure: FailureRow | None = None  # The error that ended the run early; None if it completed.
    ladder_reason: str = ""  # Why the ladder's fixes were chosen, for `--fix auto`.
    ladder_left_out: dict[str, str] = field(default_factory=dict)  # Fix -> why it has no row.
    batches: Batches | None = None  # With varying lengths (`--lengths`), and for scripts whose steps differ.
    # Training steps of a script; empty if fewer than two ended.
    steps: tuple[TrainingStep, ...] = ()
    # With several GPUs in one process: the GPU that the report is about, except for verdict and findings.
    gpu: str = ""
    gpus: tuple[GpuRow, ...] = ()  # With several GPUs in one process: a row for each.
    # The search of `--largest`; the report is about the largest run that fits, or the smallest if none does.
    limit: LargestSearch | None = None
    # A change of the script that was run, and needs less, if requested (`--suggest-patch`).
    patch: SuggestedPatch | None = None
    # The rank that the report is about, except for verdict and findings; None: the program is one process.
    rank: RankFacts | None = None
    # A row for each rank of a program whose ranks ran together.
    ranks: tuple[RankRow, ...] = ()
    # Memory by CUDA stream, if several streams allocated.
    streams: StreamMemory | None = None
    # An inference engine that the script has started, or that has refused to start; None: there is none.
    engine: EngineBudget | None = None
    # Bytes by category at a hundred moments; None: a report of an early memprof release.
    over_time: OverTime | None = None
    # The ledger that the report was made of, for figures; None: the report is from JSON, or has only totals.
    ledger: Ledger | None = field(default=None, compare=False, metadata=json_name(None))

    @property
    def paged_bytes(self) -> int:
        """Return the bytes of a run that fits which do not stay in memory, where GPU and host share it: those above the
        working set that Metal recommends, or those of GPU and host tensors together above the machine's memory."""
        device, peak = self.device, self.peak
        if device.unified_bytes is None or device.total_bytes is None:
            return 0
        return max(
            peak.reserved_bytes - device.total_bytes,
            peak.device_used_bytes + peak.host_allocated_bytes - device.unified_bytes,
            0,
        )

    @property
    def fits_in_memory(self) -> bool | None:
        """Return whether a run fits and none of it pages, at which searches aim; None: not known."""
        return self.verdict.fits and not self.paged_bytes

    @property
    def pages(self) -> bool:
        """Return whether a run fits, and some of the memory that GPU and host share pages."""
        return bool(self.verdict.fits and self.paged_bytes)

    @property
    def on_cpu(self) -> bool:
        """Return whether the run was measured on a CPU, which has no CUDA context and no caching allocator."""
        is_old_report = self.model_state is None  # these have no bridge either
        device_option = None if self.target is None else self.target.asked.device
        return self.source == "measured" and (device_option == "cpu" if is_old_report else self.bridge is None)

    def plot(self, kind: str = "timeline") -> Any:
        """Return a plotly figure (`plotly`): memory over the run, a treemap of the peak, or the fixes.

        Args:
            kind: `timeline`, `treemap` or `ladder`.

        Raises:
            UsageError: no such figure, or the report lacks its data: a report from JSON has no moments.
        """
        from memprof.report.page.figures import draw_figure

        return draw_figure(kind, self.ledger, self.device, self.ladder)

    def tables(self) -> dict[str, RowTable]:
        """Return the tables by name: stages, peak, findings and others."""
        batches = self.batches
        evidence = ((finding.id, evidence_item) for finding in self.findings for evidence_item in finding.evidence)
        suggestions = ((finding.id, suggestion) for finding in self.findings for suggestion in finding.suggestions)
        return {
            "stages": RowTable(self.stages, Stage),
            "steps": RowTable(self.steps, TrainingStep),
            "batches": RowTable(batches.steps if batches else (), BatchStep),
            "reserved": RowTable(batches.reserved if batches else (), ReservedOverSteps),
            "categories": RowTable(self.peak.categories.items(), key_columns={"category": str, "bytes": int}),
            "tensors": RowTable(self.peak.tensors, LiveTensor),
            "ledger": RowTable(self.peak.rows, Row),
            "findings": RowTable(self.findings, Finding),
            "evidence": RowTable(evidence, Evidence, {"finding": str}),
            "suggestions": RowTable(suggestions, Suggestion, {"finding": str}),
            "ladder": RowTable(self.ladder, LadderRow),
            **({"gpus": RowTable(self.gpus, GpuRow)} if self.gpus else {}),
            **({"ranks": RowTable(self.ranks, RankRow)} if self.ranks else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the document as plain JSON values (docs/json.md lists the names)."""
        values = super(Report, self).to_json() | {"target": target_to_json(self.target)}
        optional = ("gpus", "limit", "patch", "rank", "ranks", "streams", "engine", "over_time")
        omitted = {name for name in optional if not getattr(self, name)} | ({"gpu"} if not self.gpus else set())
        if self.bridge is not None and self.bridge.nccl_group_bytes is None:
            del values["bridge"]["nccl_group_bytes"]
        if self.paged_bytes:
            values["verdict"]["paged_bytes"] = self.paged_bytes
        if self.verdict.max_buffer_bytes is None:
            del values["verdict"]["max_buffer_bytes"]
        if self.rank is not None:
            values["rank"] = {key: value for key, value in values["rank"].items() if value or key not in _RANK_OPTIONAL}
        return {name: values[name] for name in values if name not in omitted}


def _sum_by_culprit(ledger: Ledger, findings: list[Finding]) -> dict[str, dict[str, int]]:
    """Return the bytes at the peak that what findings name keeps: name -> category -> bytes."""
    sums: dict[str, dict[str, int]] = {}
    told: set[int] = set()
    shown = [one for one in findings if one.is_decisive] or [
        one for one in findings if one.severity is not Severity.NOTE
    ]
    for culprit in (one.culprit for one in shown if one.culprit is not None):
        kept = culprit.storages - told
        told |= kept
        for tensor in ledger.live:
            if count := len(kept.intersection(tensor.storages)):
                if tensor.category is Category.KEPT:  # also what was just made, and is kept like the others
                    count = tensor.count
                row = sums.setdefault(culprit.name, {})
                num_bytes = tensor.allocated_bytes // tensor.count * count
                row[tensor.category.value] = row.get(tensor.category.value, 0) + num_bytes
    return sums


_RANK_OPTIONAL = ("alike", "without_nccl")  # Left out of JSON if empty.


def build_report(
    ledger: Ledger,
    findings: list[Finding],
    settings: Settings,
    bridge: Bridge | None = None,
    streams: StreamMemory | None = None,
    growth: Growth | None = None,
) -> Report:
    """Return the report on the run of `ledger`; `settings` are the allocator settings with which it was replayed."""
    trace = ledger.trace
    facts = trace.facts
    context_bytes, limit = facts.device.context_bytes, facts.device.host_memory_bytes
    outside_bytes = context_bytes + (compute_libraries_bytes(trace) or 0)
    on_cpu, has_context = trace.device == CPU, facts.device.has_cuda_context
    context_stage = Stage("context", 0, 0, device_used_bytes=context_bytes if trace.source == "simulated" else None)
    peak_stage, reserved_stage = ledger.peak_stage, ledger.peak_reserved_stage
    steps = () if facts.command == "profile" else tuple(list_training_steps(trace, ledger.allocated))
    return Report(
        schema=SCHEMA,
        memprof_version=facts.memprof_version,
        command=facts.command,
        source=trace.source,
        target=facts.target,
        program=facts.program,
        device=facts.device,
        allocator=settings.facts,
        stages=(*((context_stage,) if has_context and not on_cpu else ()), *ledger.stages),
        peak=Peak(
            stage=peak_stage.name,
            step=peak_stage.step,
            micro_batch=peak_stage.micro_batch,
            allocated_bytes=ledger.peak_bytes,
            reserved_bytes=ledger.peak_reserved_bytes,
            reserved_stage=reserved_stage.name,
            reserved_step=reserved_stage.step,
            reserved_micro_batch=reserved_stage.micro_batch,
            device_used_bytes=ledger.peak_reserved_bytes + outside_bytes,
            host_allocated_bytes=ledger.host[ledger.peak_event],
            categories={category.value: num_bytes for category, num_bytes in ledger.sum_by_category().items()},
            tensors=tuple(ledger.live),
            rows=tuple(ledger.rows),
            workspaces=Workspaces.from_trace(trace, ledger.allocated, ledger.peak_event, ledger.run.refused),
            culprits=_sum_by_culprit(ledger, findings),
        ),
        host_peak_bytes=ledger.host_peak_bytes,
        bridge=bridge,
        model_state=compute_model_state(trace),
        findings=tuple(findings),
        ladder=(),
        verdict=_build_verdict(ledger, outside_bytes, growth),
        assumptions=(
            *trace.assumptions,
            *(() if limit is None else (f"The machine has {format_bytes(limit)} of host memory (--host-memory).",)),
            *(() if on_cpu else _list_gpu_assumptions(ledger, settings, context_bytes)),
            *((_OUTSIDE_NOTE,) if bridge is not None and bridge.is_outside_unknown and has_context else ()),
            *(() if ledger.run.bounds is None else (_BORROWED_NOTE,)),
        ),
        failure=None if trace.failure is None else FailureRow(trace.failure.kind.value, *trace.failure[1:7]),
        batches=None if trace.failure else build_batches(ledger.run, ledger.allocated, steps),
        steps=() if len(steps) < 2 else steps,
        rank=facts.rank,
        streams=streams,
    )


def _decide_fit(
    trace: Trace, oom: OutOfMemoryMoment | None, host_over_bytes: int, growth: Growth | None
) -> bool | None:
    """Return whether a run fits device and host memory; None if the run ended too early to tell."""
    failure = trace.failure
    runs_out = growth is not None and growth.runs_out and failure is None
    if oom or host_over_bytes or runs_out or (failure is not None and failure.kind is FailureKind.OUT_OF_MEMORY):
        return False
    return None if failure or _is_stopped_early(trace) else True


def _is_stopped_early(trace: Trace) -> bool:
    """Return whether --timeout stopped a script before its first training step, or first forward without training."""
    program = trace.facts.program
    if program is None or program.ended != "timeout":
        return False
    kinds = [phase.kind for phase in trace.phases]
    trains = trace.trains or PhaseKind.BACKWARD in kinds or PhaseKind.EVALUATION in kinds
    # The last phase has not ended.
    has_finished_pass = PhaseKind.OPTIMIZER_STEP in kinds[:-1] or any(phase.step > 1 for phase in trace.phases)
    return not has_finished_pass and (trains or not trace.forwards)


def _list_gpu_assumptions(ledger: Ledger, settings: Settings, context_bytes: int) -> tuple[str, ...]:
    nvml = ledger.trace.facts.nvml
    is_measured = nvml is not None and nvml.process_bytes is not None
    origin = "as NVML says of this process" if is_measured else "measured on one GPU; it varies by GPU and driver"
    suffix = "; after the request that the GPU refuses, as on a GPU without limit." if ledger.out_of_memory else "."
    device = ledger.trace.facts.device
    allocator = "MPS allocator's heaps" if device.backend == "mps" else "caching allocator"
    context = (f"The CUDA context takes {context_bytes >> 20} MiB ({origin}).",) if device.has_cuda_context else ()
    return (*context, f"Reserved memory is that of the {allocator} of {settings}, replayed request by request{suffix}")


def _build_verdict(ledger: Ledger, outside_bytes: int, growth: Growth | None) -> Verdict:
    trace, oom, run = ledger.trace, ledger.out_of_memory, ledger.run
    storage = trace.storages[oom.storage] if oom else None
    caught_errors = list_caught_errors(ledger)
    host_limit = trace.facts.device.host_memory_bytes
    host_over_bytes = 0 if host_limit is None else max(ledger.host_peak_bytes - host_limit, 0)
    return Verdict(
        fits=_decide_fit(trace, oom, host_over_bytes, growth),
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
        required_bytes=run.least_reserved_bytes + outside_bytes,
        out_of_memory_caught=len(caught_errors),
        first_caught=caught_errors[0] if caught_errors else None,
        growth=growth,
        host_over_bytes=host_over_bytes,
        oom_callers=tuple(trace.sources[one.source] for one in trace.list_callers(oom.storage)) if oom else (),
        expandable_segments_help=_try_expandable_segments(run) if trace.ended_out_of_memory else None,
        max_buffer_bytes=oom.max_buffer_bytes if oom else None,
    )


def _try_expandable_segments(run: GpuReplay) -> bool | None:
    """Return whether `run` has no failed allocation with expandable segments; None if it has them, or cannot."""
    if not run.rounds or run.config.expandable_segments or not run.has_expandable_segments:
        return None
    return run.compute_needs(dataclasses.replace(run.config, expandable_segments=True)).fits
