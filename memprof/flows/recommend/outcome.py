"""Memory, step time and verdict of a simulated run, computed from its trace."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.device.catalog import Gpu
from memprof.fixes.catalog import find_device_reason, find_fixes_for
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.flows.account import analyze
from memprof.flows.cost import StepWork, compute_step_work
from memprof.ledger.batches import Batches
from memprof.ledger.state import ModelState
from memprof.report.documents.limit import PAGING
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import Target, target_to_json

HOST_MEMORY = "host memory"  # the stage of a run that fits the GPU, but not the host


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Memory, step time and verdict of a simulated run."""

    # The run's options without defaults: context length, allocator settings, and expandable segments if the run fits
    # only with them.
    spec: TargetSpec
    needed_bytes: int  # of the GPU, CUDA context included, to never fail an allocation
    fits: bool  # both the GPU and the host, without paging
    host_bytes: int  # peak of host memory
    step: StepWork | None  # of one optimizer step, or one forward; None: not counted
    state: ModelState
    target: Target
    oom_stage: str
    batches: Batches | None  # None: all batches have one length

    @property
    def seconds(self) -> float:
        """Return a lower bound of the step time in seconds; 0 if unknown."""
        return 0.0 if self.step is None else self.step.seconds


def evaluate_run(
    trace: Trace, spec: TargetSpec, micro_batches: int, *, gpu: Gpu, avoids_retries: bool = False
) -> SimulatedRun:
    """Return memory, step time (of `micro_batches`) and verdict of `trace`, a run of `spec` on `gpu`.

    If the run does not fit, or with `avoids_retries` fits only with allocator retries, try expandable segments.
    """
    document = analyze(trace, with_details=False)
    tensors_fit = document.peak.allocated_bytes <= gpu.total_bytes - gpu.context_bytes
    fits, capacity = document.fits_in_memory, gpu.total_bytes
    needs_retries = avoids_retries and document.verdict.required_bytes > capacity
    is_wanted = (needs_retries or not fits) and tensors_fit
    expanded = _use_expandable_segments(spec, gpu, document.target) if is_wanted else None
    if expanded is not None:
        expandable_report = analyze(trace, expanded.alloc_conf, with_details=False)
        if expandable_report.fits_in_memory and (not fits or expandable_report.verdict.required_bytes <= capacity):
            spec, document = expanded, expandable_report
    verdict, target, state = document.verdict, document.target, document.model_state
    assert target is not None and state is not None
    stage = verdict.oom_stage or ""
    oom_stage = f"{stage} of step {verdict.oom_step}" if stage and spec.mode is Mode.TRAIN else stage
    return SimulatedRun(
        spec=spec.edit(context_length=target.context_length, alloc_conf=document.allocator.alloc_conf),
        needed_bytes=verdict.required_bytes,
        fits=bool(document.fits_in_memory),
        host_bytes=document.host_peak_bytes,
        step=compute_step_work(trace, gpu, micro_batches),
        state=state,
        target=target,
        oom_stage=oom_stage or (HOST_MEMORY if verdict.host_over_bytes else PAGING if document.paged_bytes else ""),
        batches=document.batches,
    )


def _use_expandable_segments(spec: TargetSpec, gpu: Gpu, target: Target | None) -> TargetSpec | None:
    """Return the spec with expandable segments, against fragmentation; None if `spec` already has these segments, or
    `gpu` has none."""
    fix = find_fixes_for("fragmentation")[0]
    return (
        None
        if fix.is_on(spec) or find_device_reason(fix, gpu)
        else edit_spec(spec, ChosenFix(fix), target_to_json(target))
    )
