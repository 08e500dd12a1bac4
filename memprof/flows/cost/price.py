"""What a run with remedies costs more than the one without."""

from __future__ import annotations

from memprof.flows.cost.work import StepWork
from memprof.report.documents.ladder import Cost
from memprof.trace.events import Compiling


def cost_of(
    work: StepWork | None, original: StepWork | None, numerics: str, note: str, compiling: Compiling | None = None
) -> Cost:
    """What a run with remedies costs more than the one without."""
    seconds, kernels = (None, None) if compiling is None else compiling
    if work is None or original is None:
        return Cost(*(None,) * 9, numerics, note, compile_seconds=seconds, compiled_kernels=kernels)
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
        link_bytes=work.link_bytes,
        extra_link_bytes=work.link_bytes - original.link_bytes,
        extra_link_seconds=work.link_seconds - original.link_seconds,
        compile_seconds=seconds,
        compiled_kernels=kernels,
    )
