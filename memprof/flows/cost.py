"""The work and time of a step, the cost that a fix adds to a step, and the bottleneck of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from memprof.device.catalog import Gpu
from memprof.ledger.categories import Category
from memprof.report.documents.ladder import Bottleneck, FixCost
from memprof.report.documents.report import Report
from memprof.trace.events import HOST, CompileStats, Phase, Trace
from memprof.units import format_bytes


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one optimizer step (or one inference step), the last of a run.

    Times are lower bounds at the GPU's published rates: an operator takes the longer of operations / peak rate and
    bytes / memory bandwidth, a host transfer bytes / bus bandwidth, and communication between GPUs bytes / link
    bandwidth. Real kernels reach a part of each rate.
    """

    operations: int  # floating-point operations in products of matrices, attention and convolutions
    bus_bytes: int  # copied between host and GPU, both ways together
    host_bytes: int  # read and written by operators on the CPU
    compute_seconds: float
    bus_seconds: float
    link_bytes: int  # sent to other GPUs
    link_seconds: float

    @property
    def seconds(self) -> float:
        """Return the sum of compute, bus and link seconds: overlap is not modelled."""
        return self.compute_seconds + self.bus_seconds + self.link_seconds


def compute_step_work(trace: Trace, gpu: Gpu, micro_batches: int = 0) -> StepWork | None:
    """Return the work of the last step of a run on this GPU; None if the work was not counted.

    If the step ran fewer than `micro_batches` micro-batches, the work of the last one is added for each missing one.
    """
    if not trace.work:
        return None
    last_step = max(phase.step for phase in trace.phases)
    num_run = max(phase.micro_batch for phase in trace.phases if phase.step == last_step)
    full_step = _sum_work(trace, gpu, lambda phase: phase.step == last_step)
    if micro_batches <= num_run:
        return full_step
    micro_batch_work = _sum_work(trace, gpu, lambda phase: phase.step == last_step and phase.micro_batch == num_run)
    work_pairs = zip(astuple(full_step), astuple(micro_batch_work), strict=True)
    return StepWork(*(step_value + (micro_batches - num_run) * unit_value for step_value, unit_value in work_pairs))


def _sum_work(trace: Trace, gpu: Gpu, is_counted: Callable[[Phase], bool]) -> StepWork:
    operations = bus = host = link = 0
    compute = 0.0
    for work in trace.work:
        if not is_counted(trace.phases[work.phase]):
            continue
        bus_bytes = work.to_device_bytes + work.to_host_bytes
        bus += bus_bytes * work.calls
        link += work.link_bytes * work.calls
        if work.device == HOST:
            host += work.num_bytes * work.calls
        elif not bus_bytes:
            operations += work.operations * work.calls
            rate = gpu.peak_flops.get(work.dtype) or gpu.peak_flops.get("float32")
            flop_seconds = work.operations / rate if rate else 0.0
            compute += work.calls * max(flop_seconds, work.num_bytes / gpu.memory_bandwidth)
    return StepWork(operations, bus, host, compute, bus / gpu.host_bandwidth, link, link / gpu.link_bandwidth)


_COST_FIELDS = ("operations", "bus_bytes", "seconds", "compute_seconds", "bus_seconds", "link_bytes", "link_seconds")


def compute_cost(
    work: StepWork | None, original: StepWork | None, numerics: str, note: str, compiling: CompileStats | None = None
) -> FixCost:
    """Return the cost that fixes add to a step: the work with fixes (`work`) less the work without (`original`)."""
    seconds, kernels = (None, None) if compiling is None else compiling
    if work is None or original is None:
        return FixCost(*(None,) * 9, numerics, note, compile_seconds=seconds, compiled_kernels=kernels)
    extra = {f"extra_{name}": getattr(work, name) - getattr(original, name) for name in _COST_FIELDS}
    return FixCost(
        operations=work.operations,
        bus_bytes=work.bus_bytes,
        step_seconds=work.seconds,
        host_bytes=work.host_bytes,
        numerics=numerics,
        note=note,
        link_bytes=work.link_bytes,
        compile_seconds=seconds,
        compiled_kernels=kernels,
        **extra,
    )


def find_bottleneck(document: Report) -> Bottleneck:
    """Return the stage in which a run fails or has its peak, and the largest category of memory in this stage."""
    verdict, peak = document.verdict, document.peak
    category = next(iter(peak.categories))
    size = peak.categories[category]
    if document.failure is not None:
        text = f"fails in {document.failure.phase}"
        return Bottleneck(peak.stage, peak.step, category, peak.allocated_bytes, text)
    if any(finding.id == "device-mismatch" for finding in document.findings):
        return Bottleneck(peak.stage, peak.step, category, size, "stops where tensors of two devices meet")
    stage, step, tried_bytes = verdict.oom_stage, verdict.oom_step, verdict.tried_to_allocate_bytes
    if stage is None or step is None or tried_bytes is None:
        text = f"{category}, {format_bytes(size)} ({size / peak.allocated_bytes:.0%} of the peak), in {peak.stage}"
        if verdict.host_over_bytes:
            text = f"{format_bytes(verdict.host_over_bytes)} more host memory than there is (--host-memory)"
        return Bottleneck(peak.stage, peak.step, category, size, text)
    cause = f"out of memory in {stage}{f' of step {step}' if step else ''}: {format_bytes(tried_bytes)} requested"
    if peak.allocated_bytes <= (document.device.usable_bytes or 0):
        # All tensors together would fit: fragmentation is in the way.
        wasted = (verdict.reserved_bytes or 0) - (verdict.in_use_bytes or 0)
        text = f"{cause}, {format_bytes(wasted)} reserved in pieces too small"
        return Bottleneck(stage, step, Category.FRAGMENTATION.value, wasted, text)
    return Bottleneck(stage, step, category, size, f"{cause}; at the peak {category}, {format_bytes(size)}")
