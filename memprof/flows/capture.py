"""Capture: run a workload on a device and return its trace."""

from __future__ import annotations

from collections.abc import Callable

from memprof.allocator import parse_release
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, RunFailedError
from memprof.flows.gpus import GPUS_PER_MACHINE
from memprof.flows.progress import report_progress_with
from memprof.measured import MeasuredDevice
from memprof.measured.cuda import NvmlUse
from memprof.stubs.extension import extensions
from memprof.trace.events import EventKind, FailureKind, ModuleRole, PhaseKind, Trace
from memprof.virtual import VirtualGpu
from memprof.virtual.allocator_answers import AllocatorSettings, MemoryStatistics
from memprof.watch.collection import disable_garbage_collection
from memprof.watch.failure import describe_measured_failure
from memprof.workload.custom_code import forbid_exit
from memprof.workload.rng import NormalsInSinglePrecision, preserve_rng_state
from memprof.workload.step import Workload

_MAX_EVENTS_SEARCHED = 20_000  # last events that are searched for a layer; a layer has fewer


def capture_virtual(
    workload: Workload,
    gpu: Gpu,
    progress: Callable[[str], None] = lambda _: None,
    memory: Callable[[Trace], MemoryStatistics] | None = None,
    allocator_settings: AllocatorSettings | None = None,
) -> Trace:
    """Run `workload` on a virtual GPU and return its trace; `memory` and `allocator_settings` go to VirtualGpu. Raises
    UsageError: the workload cannot be built; RunFailedError (with the trace so far): the model's code raised."""
    spec = workload.spec
    device = VirtualGpu(
        gpu,
        gpus=min(spec.gpus, GPUS_PER_MACHINE),
        nodes=-(-spec.gpus // GPUS_PER_MACHINE),
        rank=spec.rank or 0,
        context_bytes=gpu.context_bytes,
        tensors_only=not spec.workspaces,
        memory=memory,
        allocator_settings=allocator_settings,
        release=None if spec.torch_release is None else parse_release(spec.torch_release).version,
        records_callers=False,
        extensions=extensions(),
    )
    try:
        # Garbage collection is off, and random states are restored after the run.
        with (
            disable_garbage_collection(),
            preserve_rng_state(),
            device,
            forbid_exit("the model"),
            report_progress_with(lambda: _describe_progress(device.trace)),
        ):
            workload.run(device, progress)
    except MemprofError:
        raise
    except Exception as error:
        trace = device.trace
        failure = trace.failure
        assert failure is not None
        location = failure.source.rpartition(" ")[0] if failure.source else "unknown place"
        run_error = RunFailedError(
            f"the run failed in {failure.phase} with {failure.error}",
            value=f"{failure.message} ({location})",
            hint="if the same code runs on a real GPU, this is a gap of the virtual one; --debug shows the traceback",
        )
        run_error.trace = trace
        raise run_error from error
    return device.trace


def _describe_progress(trace: Trace) -> str:
    """Return a description of the running phase: "layer N of M" in a forward, else its name; empty if unknown."""
    modules = trace.modules
    for event in reversed(trace.events[-_MAX_EVENTS_SEARCHED:]):
        if event.kind is EventKind.PHASE:
            kind = trace.phases[event.ref].kind
            return "" if kind in (PhaseKind.MODEL, PhaseKind.OTHER) else kind.value
        if event.kind is EventKind.ENTER and modules[event.ref].role is ModuleRole.LAYER:
            layers = [index for index, one in enumerate(modules) if (one.role, one.stack) == modules[event.ref][2:]]
            return f"layer {layers.index(event.ref) + 1} of {len(layers)}"
    return ""


def capture_measured(
    workload: Workload, device_name: str, progress: Callable[[str], None] = lambda _: None, *, detail: bool = False
) -> Trace:
    """Run `workload` on a real device, "cpu" or "cuda", and return its trace. Raises UsageError: the workload cannot be
    built; RunFailedError (with the trace so far): the model's code raised, or memory ran out."""
    progress("importing the model")
    workload.source.import_code()
    device = MeasuredDevice(device_name, NvmlUse() if device_name == "cuda" else None, detail=detail)
    try:
        with disable_garbage_collection(), preserve_rng_state(), device, forbid_exit("the model"):
            workload.run(device, progress, building=NormalsInSinglePrecision)
        if device.error is not None:
            raise device.error
    except MemprofError:
        raise
    except Exception as error:
        failure = device.trace.failure = describe_measured_failure(error, device.find_error_phase(error))
        run_error = RunFailedError(
            f"memory ran out in {failure.phase}"
            if failure.kind is FailureKind.OUT_OF_MEMORY
            else f"the run failed in {failure.phase} with {failure.error}",
            value=failure.message,
            hint="the report says what was live then; --debug shows the traceback",
        )
        run_error.trace = device.trace
        # The exception's frames would keep the model's tensors live.
        error.__traceback__ = None
        raise run_error from None
    return device.trace
