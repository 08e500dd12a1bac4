"""`torch.profiler` in the program: what runs here runs on the host, and there is no card to record."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler

from memprof.torch_private import autograd
from memprof.workload.quantization import import_quietly

_LATE = ("torch.utils.flop_counter",)
"""What memprof imports while operators run. torch's tracer keeps the name of every code object that it sees without the
object: of a module's own code, which is gone after its import, it reads freed memory at the end."""


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement)."""
    original = autograd_profiler.profile.__init__

    @functools.wraps(original)
    def __init__(profiler: Any, *args: Any, **kwargs: Any) -> None:
        for name in _LATE:
            import_quietly(name)
        original(profiler, *args, **kwargs)
        kinds = autograd.ProfilerState
        if getattr(profiler, "profiler_kind", None) == kinds.KINETO_GPU_FALLBACK:
            # It would ask for a CUDA event at each operator, and write a page of warnings where none can be had.
            profiler.profiler_kind = kinds.KINETO
        activities = getattr(profiler, "kineto_activities", None)
        if activities:
            activities.discard(torch.profiler.ProfilerActivity.CUDA)

    yield autograd_profiler.profile, "__init__", __init__
