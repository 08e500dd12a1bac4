"""The work of one step on a card, from what a run counted operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from memprof.catalog import Gpu
from memprof.trace.events import HOST, Phase, Trace


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one optimizer step (or one inference step) does, the last of a run.

    Times are lower bounds at the card's published rates: an operator takes as long as its operations or its bytes do,
    whichever is longer, a transfer as long as its bytes take over the bus, and what goes to other cards as long as over
    the card's links. Real kernels reach a part of each.
    """

    operations: int
    """Floating-point operations in products of matrices, attention and convolutions."""
    bus_bytes: int
    """Copied between host and card, both ways together."""
    host_bytes: int
    """Read and written by operators on the CPU."""
    compute_seconds: float
    bus_seconds: float
    link_bytes: int
    """Sent to other cards."""
    link_seconds: float

    @property
    def seconds(self) -> float:
        """All of them, one after the other: what overlaps is not known."""
        return self.compute_seconds + self.bus_seconds + self.link_seconds


def step_work(trace: Trace, gpu: Gpu, micro_batches: int = 0) -> StepWork | None:
    """The work of the last step of a run on this card; None if it was not counted.

    Of `micro_batches`, the last one that was run stands for those that were not: they do the same on tensors of the
    same shapes.
    """
    if not trace.work:
        return None
    last = max(phase.step for phase in trace.phases)
    ran = max(phase.micro_batch for phase in trace.phases if phase.step == last)
    whole = _work(trace, gpu, lambda phase: phase.step == last)
    if micro_batches <= ran:
        return whole
    one = _work(trace, gpu, lambda phase: phase.step == last and phase.micro_batch == ran)
    both = zip(astuple(whole), astuple(one), strict=True)
    return StepWork(*(of_all + (micro_batches - ran) * of_one for of_all, of_one in both))


def _work(trace: Trace, gpu: Gpu, counts: Callable[[Phase], bool]) -> StepWork:
    operations = bus = host = link = 0
    compute = 0.0
    for work in trace.work:
        if not counts(trace.phases[work.phase]):
            continue
        crossing = work.to_device_bytes + work.to_host_bytes
        bus += crossing * work.calls
        link += work.link_bytes * work.calls
        if work.device == HOST:
            host += work.num_bytes * work.calls
        elif not crossing:
            operations += work.operations * work.calls
            rate = gpu.peak_flops.get(work.dtype) or gpu.peak_flops.get("float32")
            needed = work.operations / rate if rate else 0.0
            compute += work.calls * max(needed, work.num_bytes / gpu.memory_bandwidth)
    return StepWork(operations, bus, host, compute, bus / gpu.host_bandwidth, link, link / gpu.link_bandwidth)
