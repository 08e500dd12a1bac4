"""xformers.profiler, which allocates nothing.

Source: xformers/profiler of facebookresearch/xformers@v0.0.32.post2.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.stubs.registry import stub


class _ScheduledProfiler:
    """The base of the profilers that xformers runs by a schedule, which programs may subclass; records nothing."""

    ACTIVITIES = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    def __init__(self, main_profiler) -> None:
        self.main_profiler = main_profiler

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""


DEFAULT_SCHEDULE: tuple[Any, ...] = ()
_PROFILER = "facebookresearch/xformers@v0.0.32.post2:xformers/profiler"
for _name in ("MemSnapshotsProfiler", "NsightProfiler", "PyTorchProfiler"):
    stub(
        f"xformers.profiler.profiler.{_name}", f"xformers.profiler.api.{_name}", f"xformers.profiler.{_name}",
        source=f"{_PROFILER}/profiler.py",
    )(type(_name, (_ScheduledProfiler,), {}))  # fmt: skip


@stub("xformers.profiler.api.profile", "xformers.profiler.profile", source=f"{_PROFILER}/api.py")
class _Profile:
    """xformers' profiler of a program's steps, which records nothing."""

    def __init__(self, output_dir, module=None, schedule=DEFAULT_SCHEDULE):
        self.output_dir = output_dir

    def __enter__(self):
        return self

    def start(self, *error):
        """Do nothing."""

    __exit__ = stop = step = start


@stub("xformers.profiler.api.step", "xformers.profiler.step", source=f"{_PROFILER}/api.py")
def _step():
    """Do nothing; in the real package, count a step of the profiler."""
