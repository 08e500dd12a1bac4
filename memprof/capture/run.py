"""Capture: run a workload on a device and return its trace."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import TracebackType

from memprof.capture.virtual import VirtualGpu
from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import MemprofError
from memprof.trace.events import Trace
from memprof.workload.step import Workload


class RunFailedError(MemprofError):
    """The program that was run raised an error of its own; `trace` is what happened until then."""

    def __init__(self, problem: str, *, value: object, hint: str, trace: Trace) -> None:
        super().__init__(problem, value=value, hint=hint)
        self.trace = trace


def capture_virtual(workload: Workload, gpu: Gpu, progress: Callable[[str], None] = lambda doing: None) -> Trace:
    """Run `workload` on a virtual `gpu`.

    Raises:
        UsageError: the workload cannot be built.
        RunFailedError: the model's own code raised.
    """
    device = VirtualGpu(gpu, context_bytes=CONTEXT_BYTES, tensors_only=not workload.spec.workspaces)
    try:
        with _no_collection(), device:
            workload.run(device, progress)
    except MemprofError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise RunFailedError(
            f"the run failed in {device.failed_phase or 'its set-up'} with {type(error).__name__}",
            value=f"{first} ({_where(error.__traceback__)})",
            hint="if the same code runs on a real GPU, this is a gap of the virtual one; --debug shows the traceback",
            trace=device.trace,
        ) from error
    return device.trace


def _where(traceback: TracebackType | None) -> str:
    """The innermost line outside torch and memprof: where the user should look."""
    place = "unknown place"
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not any(part in name for part in ("/torch/", "/memprof/", "<frozen", "<string>")):
            place = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


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
