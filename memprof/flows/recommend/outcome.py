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

HOST_MEMORY = "host memory"
"""Where a run dies that fits the card, but not its host."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a run needs and takes.

    Attributes:
        spec: the run as it was made, with nothing left to the environment: its length, the allocator's settings, and
            where that makes it fit, expandable segments.
        needed_bytes: of the card, the context included, so that nothing is ever refused.
        fits: it came to its end on the card and its host.
        host_bytes: the most in host memory.
        step: the work of one whole optimizer step, or of one forward; None if it was not counted.
        state: parameters, gradients and optimizer state, in bytes.
        target: what the run turned out to be (dtype, number of parameters, ...).
        dies_in: where it dies, if it does.
        batches: of lengths that vary.
    """

    spec: TargetSpec
    needed_bytes: int
    fits: bool
    host_bytes: int
    step: StepWork | None
    state: ModelState
    target: Target
    dies_in: str
    batches: Batches | None

    @property
    def seconds(self) -> float:
        """The least time of a step."""
        return 0.0 if self.step is None else self.step.seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a run is to be known.

    Attributes:
        gpu: its card.
        seeks_room: what fits only because the allocator gives its cache back is looked at with expandable segments too.
        says_where: where it dies, if it does.
    """

    gpu: Gpu
    seeks_room: bool = False
    says_where: bool = True

    def of(self, trace: Trace, spec: TargetSpec, micro_batches: int) -> SimulatedRun:
        """The outcome of the run of `spec`, with so many micro-batches in a step."""
        step = step_work(trace, self.gpu, micro_batches)
        in_short = None if self.seeks_room or not _is_plain(trace, spec) else self._in_short(trace, spec, step)
        return in_short or self._reported(trace, spec, step)

    @property
    def _usable_bytes(self) -> int:
        return self.gpu.total_bytes - CONTEXT_BYTES

    def _in_short(self, trace: Trace, spec: TargetSpec, step: StepWork | None) -> SimulatedRun | None:
        """What its report says, without the ledger; None: only the report says it."""
        device, target = trace.facts.device, trace.facts.target
        host_bytes = _host_peak_bytes(trace)
        over_host = device.host_memory_bytes is not None and host_bytes > device.host_memory_bytes
        settings, needs = _needs(trace)
        if not needs.fits and not over_host and needs.allocated_bytes <= self._usable_bytes:
            edited = _with_segments(spec, target)
            if edited is not None:
                retold = with_settings(trace, edited.alloc_conf or "")
                others, other = _needs(retold)
                if other.fits:
                    spec, settings, needs, target = edited, others, other, retold.facts.target
        if not needs.required_reserved_bytes or target is None or (self.says_where and not needs.fits):
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

    def _reported(self, trace: Trace, spec: TargetSpec, step: StepWork | None) -> SimulatedRun:
        document = analyze(trace, explained=False)
        together = document.peak.allocated_bytes <= self._usable_bytes
        fits, enough = document.verdict.fits, self.gpu.total_bytes
        only_just = self.seeks_room and document.verdict.required_bytes > enough
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
    """Whether what it needs is all that there is to it: one process on one card that came to its end."""
    more = trace.cards or trace.others or trace.failure or trace.refused or trace.cut_short or trace.facts.rank
    return not more and trace.device != CPU and spec.lengths is None


def _with_segments(spec: TargetSpec, target: Target | None) -> TargetSpec | None:
    """If all tensors together would fit: perhaps they do without the pieces in between. None: it is so already."""
    remedy = helping("fragmentation")[0]
    return None if remedy.is_on(spec) else edit_spec(spec, Fix(remedy), target_to_json(target))


def _needs(trace: Trace) -> tuple[Settings, Needs]:
    settings = Settings.from_facts(trace.facts.allocator)
    return settings, needs_of(trace, CardMemory.of(trace.facts.device), settings.config, settings.release)


def _host_peak_bytes(trace: Trace) -> int:
    """The most that tensors take in host memory."""
    storages, alloc, free = trace.storages, EventKind.ALLOC, EventKind.FREE
    on_host = {place: one.num_bytes for place, one in enumerate(storages) if one.device == HOST}
    changes = (
        on_host[ref] if kind is alloc else -on_host[ref]
        for kind, ref in trace.events
        if (kind is alloc or kind is free) and ref in on_host
    )
    return max(accumulate(changes), default=0)
