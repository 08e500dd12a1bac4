"""What a search keeps of a run: what it needs and takes, told by its trace."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from memprof.allocator import CardMemory, Needs, Settings, needs_of
from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.flows.account import analyze, with_settings
from memprof.flows.cost import StepWork, step_work
from memprof.ledger.batches import Batches
from memprof.ledger.state import ModelState, model_state
from memprof.remedies.catalog import helping
from memprof.remedies.fixes import Fix, edit_spec
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import CPU, HOST, EventKind, Trace
from memprof.trace.facts import Target, target_to_json

HOST_MEMORY = "host memory"  # where a run ends that fits the GPU, but not its host


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a run needs and takes."""

    # As it was made, with nothing left to the environment: its length, the allocator's settings, and where that makes
    # it fit, expandable segments.
    spec: TargetSpec
    needed_bytes: int  # of the GPU, the context included, so that nothing is ever refused
    fits: bool  # it came to its end on the GPU and its host
    host_bytes: int  # the most in host memory
    step: StepWork | None  # of one whole optimizer step, or of one forward; None: it was not counted
    state: ModelState
    target: Target
    dies_in: str
    batches: Batches | None  # of lengths that vary

    @property
    def seconds(self) -> float:
        """Return the least time of a step."""
        return 0.0 if self.step is None else self.step.seconds


def outcome_of(
    trace: Trace, spec: TargetSpec, micro_batches: int, *, gpu: Gpu, seeks_room: bool = False, says_where: bool = True
) -> SimulatedRun:
    """Return the outcome of the run of `spec`, with so many micro-batches in a step.

    Args:
        gpu: that of the run.
        seeks_room: look with expandable segments too at what fits only because the allocator gives its cache back.
        says_where: say where it runs out of memory, if it does.
    """
    step, usable_bytes = step_work(trace, gpu, micro_batches), gpu.total_bytes - CONTEXT_BYTES
    if not seeks_room and _is_plain(trace, spec):
        # The ledger of a report takes a fifth of the time of the run.
        found = _from_replay(trace, spec, step, usable_bytes, says_where=says_where)
        if found is not None:
            return found
    return from_report(trace, spec, step, usable_bytes, seeks_room=seeks_room)


def _from_replay(
    trace: Trace, spec: TargetSpec, step: StepWork | None, usable_bytes: int, *, says_where: bool
) -> SimulatedRun | None:
    """Return what the report would say, without the ledger; None: only the report says it."""
    device, target = trace.facts.device, trace.facts.target
    host_bytes = _host_peak_bytes(trace)
    over_host = device.host_memory_bytes is not None and host_bytes > device.host_memory_bytes
    settings, needs = _needs(trace)
    if not needs.fits and not over_host and needs.allocated_bytes <= usable_bytes:
        edited = _with_segments(spec, target)
        if edited is not None:
            retold = with_settings(trace, edited.alloc_conf or "")
            others, other = _needs(retold)
            if other.fits:
                spec, settings, needs, target = edited, others, other, retold.facts.target
    if not needs.required_reserved_bytes or target is None or (says_where and not needs.fits):
        return None
    return SimulatedRun(
        spec=spec.edit(context_length=target.context_length, alloc_conf=settings.alloc_conf),
        needed_bytes=needs.required_reserved_bytes + device.context_bytes,
        fits=needs.fits and not over_host,
        host_bytes=host_bytes,
        step=step,
        state=model_state(trace),
        target=target,
        dies_in=HOST_MEMORY if over_host and needs.fits else "",
        batches=None,
    )


def from_report(
    trace: Trace, spec: TargetSpec, step: StepWork | None, usable_bytes: int, *, seeks_room: bool = False
) -> SimulatedRun:
    """Return the outcome that the report of a run says; the arguments are those of `outcome_of`."""
    document = analyze(trace, explained=False)
    together = document.peak.allocated_bytes <= usable_bytes
    fits, enough = document.verdict.fits, usable_bytes + CONTEXT_BYTES
    only_just = seeks_room and document.verdict.required_bytes > enough
    edited = _with_segments(spec, document.target) if (only_just or not fits) and together else None
    if edited is not None:
        again = analyze(trace, edited.alloc_conf, explained=False)
        if again.verdict.fits and (not fits or again.verdict.required_bytes <= enough):
            spec, document = edited, again
    verdict, target, state = document.verdict, document.target, document.model_state
    assert target is not None and state is not None
    where = verdict.oom_stage or ""
    dies_in = f"{where} of step {verdict.oom_step}" if where and spec.mode is Mode.TRAIN else where
    return SimulatedRun(
        spec=spec.edit(context_length=target.context_length, alloc_conf=document.allocator.alloc_conf),
        needed_bytes=verdict.required_bytes,
        fits=bool(verdict.fits),
        host_bytes=document.host_peak_bytes,
        step=step,
        state=state,
        target=target,
        dies_in=dies_in or (HOST_MEMORY if verdict.host_over_bytes else ""),
        batches=document.batches,
    )


def _is_plain(trace: Trace, spec: TargetSpec) -> bool:
    """Say whether what it needs is all that there is to it: one process on one card that came to its end."""
    more = trace.cards or trace.others or trace.failure or trace.refused or trace.cut_short or trace.facts.rank
    return not more and trace.device != CPU and spec.lengths is None


def _with_segments(spec: TargetSpec, target: Target | None) -> TargetSpec | None:
    """Return the spec without pieces in between, with which what all tensors fit may fit; None: it is so already."""
    remedy = helping("fragmentation")[0]
    return None if remedy.is_on(spec) else edit_spec(spec, Fix(remedy), target_to_json(target))


def _needs(trace: Trace) -> tuple[Settings, Needs]:
    settings = Settings.from_facts(trace.facts.allocator)
    return settings, needs_of(trace, CardMemory.of(trace.facts.device), settings.config, settings.release)


def _host_peak_bytes(trace: Trace) -> int:
    """Return the most that tensors take in host memory."""
    storages, alloc, free = trace.storages, EventKind.ALLOC, EventKind.FREE
    on_host = {place: one.num_bytes for place, one in enumerate(storages) if one.device == HOST}
    changes = (
        on_host[ref] if kind is alloc else -on_host[ref]
        for kind, ref in trace.events
        if (kind is alloc or kind is free) and ref in on_host
    )
    return max(accumulate(changes), default=0)
