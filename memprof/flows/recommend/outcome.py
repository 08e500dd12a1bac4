"""The outcome of a run that a search keeps: what it needs and takes, told by its trace."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.device.catalog import Gpu
from memprof.fixes.catalog import find_helpful
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.flows.account import analyze
from memprof.flows.cost import StepWork, step_work
from memprof.ledger.batches import Batches
from memprof.ledger.state import ModelState
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import Target, target_to_json

HOST_MEMORY = "host memory"  # where a run ends that fits the GPU, but not its host


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The memory that a run needs and takes."""

    # As it was made, with nothing left to the environment: its length, the allocator's settings, and where that makes
    # it fit, expandable segments.
    spec: TargetSpec
    needed_bytes: int  # of the GPU, the context included, so that nothing is ever refused
    fits: bool  # it came to its end on the GPU and its host
    host_bytes: int  # the most in host memory
    step: StepWork | None  # of one whole optimizer step, or of one forward; None: it was not counted
    state: ModelState
    target: Target
    oom_stage: str
    batches: Batches | None  # of lengths that vary

    @property
    def seconds(self) -> float:
        """Return the least time of a step."""
        return 0.0 if self.step is None else self.step.seconds


def outcome_of(
    trace: Trace, spec: TargetSpec, micro_batches: int, *, gpu: Gpu, seeks_room: bool = False
) -> SimulatedRun:
    """Return the outcome of the run of `spec` on `gpu`, with so many micro-batches in a step.

    With `seeks_room`, expandable segments are tried too where it fits only because the allocator gives its cache back.
    """
    document = analyze(trace, explained=False)
    together = document.peak.allocated_bytes <= gpu.total_bytes - gpu.context_bytes
    fits, enough = document.verdict.fits, gpu.total_bytes
    only_just = seeks_room and document.verdict.required_bytes > enough
    edited = _with_segments(spec, document.target) if (only_just or not fits) and together else None
    if edited is not None:
        again = analyze(trace, edited.alloc_conf, explained=False)
        if again.verdict.fits and (not fits or again.verdict.required_bytes <= enough):
            spec, document = edited, again
    verdict, target, state = document.verdict, document.target, document.model_state
    assert target is not None and state is not None
    where = verdict.oom_stage or ""
    oom_stage = f"{where} of step {verdict.oom_step}" if where and spec.mode is Mode.TRAIN else where
    return SimulatedRun(
        spec=spec.edit(context_length=target.context_length, alloc_conf=document.allocator.alloc_conf),
        needed_bytes=verdict.required_bytes,
        fits=bool(verdict.fits),
        host_bytes=document.host_peak_bytes,
        step=step_work(trace, gpu, micro_batches),
        state=state,
        target=target,
        oom_stage=oom_stage or (HOST_MEMORY if verdict.host_over_bytes else ""),
        batches=document.batches,
    )


def _with_segments(spec: TargetSpec, target: Target | None) -> TargetSpec | None:
    """Return the spec without pieces in between, with which what all tensors fit may fit; None: it is so already."""
    fix = find_helpful("fragmentation")[0]
    return None if fix.is_on(spec) else edit_spec(spec, ChosenFix(fix), target_to_json(target))
