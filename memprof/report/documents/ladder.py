"""The ladder: remedies in force one after another, each row with what it saves, what it costs and what is in the way
next. Plain data; every figure is of a run that was made with the remedies on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.catalog import Gpu
from memprof.ledger.categories import Category
from memprof.trace.events import GPU, HOST, Phase, Trace
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.report.documents.report import Document


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one optimizer step (or one inference step) does, the last of a run.

    Times are lower bounds at the card's published rates: an operator takes as long as its operations or its bytes do,
    whichever is longer, and a transfer as long as its bytes take over the bus. Real kernels reach a part of both.
    """

    operations: int
    """Floating-point operations in products of matrices, attention and convolutions."""
    bus_bytes: int
    """Copied between host and card, both ways together."""
    host_bytes: int
    """Read and written by operators on the CPU."""
    compute_seconds: float
    bus_seconds: float

    @property
    def seconds(self) -> float:
        """Both, one after the other: what overlaps is not known."""
        return self.compute_seconds + self.bus_seconds


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What decides how much a run needs: where it dies, or what the most of its peak is."""

    stage: str
    step: int
    category: str
    bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What the remedies of a row cost, against the run as it is; None where the work was not counted."""

    operations: int | None
    extra_operations: int | None
    bus_bytes: int | None
    extra_bus_bytes: int | None
    step_seconds: float | None
    extra_seconds: float | None
    extra_compute_seconds: float | None
    extra_bus_seconds: float | None
    host_bytes: int | None
    """Read and written on the CPU in a step: an optimizer that steps there takes its time."""
    numerics: str
    """exact, approximate or different: the worst of the remedies'."""
    note: str
    """What the last remedy costs, in words."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One row: the run with these remedies in force."""

    remedies: tuple[str, ...]
    added: str | None
    """The last of them; None for the run as it is."""
    peak_allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int
    """Needed on the card, the CUDA context included."""
    host_peak_bytes: int
    saved_bytes: int
    """Of the device memory that is needed, against the row above."""
    fits: bool | None
    next_bottleneck: Bottleneck
    cost: Cost


def step_work(trace: Trace, gpu: Gpu) -> StepWork | None:
    """The work of the last step of a run on this card; None if it was not counted."""
    if not trace.work:
        return None
    last = max(phase.step for phase in trace.phases)
    return _work(trace, gpu, lambda phase: phase.step == last)


def accumulated_work(trace: Trace, gpu: Gpu, micro_batches: int) -> StepWork | None:
    """The work of a step with so many micro-batches, from a run that had fewer; None if it was not counted.

    The last step's last micro-batch stands for those that were not run: they do the same on tensors of the same shapes.
    """
    if not trace.work:
        return None
    last = max(phase.step for phase in trace.phases)
    ran = max(phase.micro_batch for phase in trace.phases if phase.step == last)
    whole = _work(trace, gpu, lambda phase: phase.step == last)
    one = _work(trace, gpu, lambda phase: phase.step == last and phase.micro_batch == ran)
    more = max(micro_batches - ran, 0)
    return StepWork(
        whole.operations + more * one.operations,
        whole.bus_bytes + more * one.bus_bytes,
        whole.host_bytes + more * one.host_bytes,
        whole.compute_seconds + more * one.compute_seconds,
        whole.bus_seconds + more * one.bus_seconds,
    )


def _work(trace: Trace, gpu: Gpu, counts: Callable[[Phase], bool]) -> StepWork:
    operations = bus = host = 0
    compute = 0.0
    for work in trace.work:
        if not counts(trace.phases[work.phase]):
            continue
        crossing = work.to_device_bytes + work.to_host_bytes
        bus += crossing * work.calls
        if work.device == HOST:
            host += work.num_bytes * work.calls
        elif work.device == GPU and not crossing:
            operations += work.operations * work.calls
            rate = gpu.peak_flops.get(work.dtype) or gpu.peak_flops.get("float32")
            needed = work.operations / rate if rate else 0.0
            compute += work.calls * max(needed, work.num_bytes / gpu.memory_bandwidth)
    return StepWork(operations, bus, host, compute, bus / gpu.host_bandwidth)


def cost_of(work: StepWork | None, original: StepWork | None, numerics: str, note: str) -> Cost:
    """What a run with remedies costs more than the one without."""
    if work is None or original is None:
        return Cost(None, None, None, None, None, None, None, None, None, numerics, note)
    return Cost(
        operations=work.operations,
        extra_operations=work.operations - original.operations,
        bus_bytes=work.bus_bytes,
        extra_bus_bytes=work.bus_bytes - original.bus_bytes,
        step_seconds=work.seconds,
        extra_seconds=work.seconds - original.seconds,
        extra_compute_seconds=work.compute_seconds - original.compute_seconds,
        extra_bus_seconds=work.bus_seconds - original.bus_seconds,
        host_bytes=work.host_bytes,
        numerics=numerics,
        note=note,
    )


def bottleneck_of(document: Document) -> Bottleneck:
    """What is in the way of this run: where it dies if it does, and what most of the memory there is for."""
    verdict, peak = document.verdict, document.peak
    largest = next(iter(peak.categories))
    share = peak.categories[largest] / peak.allocated_bytes
    if document.failure is not None:
        failure = document.failure
        return Bottleneck(peak.stage, peak.step, largest, peak.allocated_bytes, f"fails in {failure.phase}")
    if verdict.fits:
        text = f"{largest}, {format_bytes(peak.categories[largest])} ({share:.0%} of the peak), in {peak.stage}"
        return Bottleneck(peak.stage, peak.step, largest, peak.categories[largest], text)
    tried = verdict.tried_to_allocate_bytes or 0
    stage = f"{verdict.oom_stage}" + (f" of step {verdict.oom_step}" if verdict.oom_step else "")
    if peak.allocated_bytes <= (document.device.usable_bytes or 0):
        # All tensors together would fit: it is the pieces in between that do not.
        wasted = (verdict.reserved_bytes or 0) - (verdict.in_use_bytes or 0)
        text = f"dies in {stage}: {format_bytes(tried)} asked, {format_bytes(wasted)} reserved in pieces too small"
        return Bottleneck(verdict.oom_stage or "", verdict.oom_step or 0, Category.FRAGMENTATION.value, wasted, text)
    at_death = largest
    text = (
        f"dies in {stage}: {format_bytes(tried)} asked; at the peak {largest}, {format_bytes(peak.categories[largest])}"
    )
    return Bottleneck(verdict.oom_stage or "", verdict.oom_step or 0, at_death, peak.categories[largest], text)
