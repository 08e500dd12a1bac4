"""Capture: run a workload on a device and return its trace."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from memprof.capture.virtual import VirtualGpu
from memprof.capture.virtual.facade import MemoryStatistics
from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import MemprofError, RunFailedError
from memprof.trace.events import Trace
from memprof.workload.step import Workload


def capture_virtual(
    workload: Workload,
    gpu: Gpu,
    progress: Callable[[str], None] = lambda doing: None,
    memory: Callable[[Trace], MemoryStatistics] | None = None,
) -> Trace:
    """Run `workload` on a virtual `gpu`; `memory` as in VirtualGpu.

    Raises:
        UsageError: the workload cannot be built.
        RunFailedError: the model's own code raised; its `trace` is what happened until then.
    """
    device = VirtualGpu(gpu, context_bytes=CONTEXT_BYTES, tensors_only=not workload.spec.workspaces, memory=memory)
    try:
        with _no_collection(), device:
            workload.run(device, progress)
    except MemprofError:
        raise
    except Exception as error:
        trace = device.trace
        failure = trace.failure
        assert failure is not None
        place = failure.source.rpartition(" ")[0] if failure.source else "unknown place"
        raised = RunFailedError(
            f"the run failed in {failure.phase} with {failure.error}",
            value=f"{failure.message} ({place})",
            hint="if the same code runs on a real GPU, this is a gap of the virtual one; --debug shows the traceback",
        )
        raised.trace = trace
        raise raised from error
    return device.trace


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Cyclic garbage would be freed at a moment that depends on what else the process does; a run's frees come from
    reference counts alone."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
