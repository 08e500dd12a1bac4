"""Memory of training steps, measured by torch's own counters: the peak of each stage, and growth from step to step.

The counters (`torch.cuda.memory_stats`) are read where one stage ends and the next begins, and their peaks are reset
there. Stages are told by hooks of the model and of torch's optimizers, which run in every trainer. On a virtual GPU
the counters are those of the simulation.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.out_of_memory import OomExplainer
from memprof.report.terminal.console import print_text
from memprof.units import GIB, MIB

DEFAULT_SNAPSHOT = "oom.pickle"
_FORWARD, _BACKWARD, _OPTIMIZER, _INFERENCE, _OTHER = "forward", "backward", "optimizer", "inference", "other"
_UNSPLIT = "forward_and_backward"  # all but the optimizer's step, where no forward of the model was seen


class StepMeter:
    """Measures the current GPU from `start` to `stop`; `read` returns figures for the log of a trainer.

    At most one meter is active, because each resets the peaks of torch's counters: `start` stops the one before.
    Without a GPU it says so once, and all figures are missing.

    Args:
        snapshot: where an out-of-memory error that ends the program leaves a snapshot of the memory, which is then
            explained on stderr as by `memprof.catch_oom`; None: torch records no allocations for it.

    Raises:
        UsageError: `snapshot` cannot be written, or is another file than a snapshot.
    """

    _active: StepMeter | None = None
    _has_said_no_gpu = False

    def __init__(self, snapshot: str | os.PathLike[str] | None = DEFAULT_SNAPSHOT) -> None:
        self._explainer = None if snapshot is None else OomExplainer(snapshot)
        self._excepthook = sys.excepthook
        self._hooks: list[Any] = []
        self._stage = _OTHER
        self._is_in_optimizer = False
        self._peaks: dict[str, int] = {}  # stage -> bytes, since the last `read`
        self._reserved_bytes = 0
        self._allocated_bytes = 0
        self._num_steps = 0  # since the last `read`
        self._end_bytes: int | None = None  # allocated at the end of the last step
        self._baseline_bytes: int | None = None  # the same at the last `read`, at first of the first step

    def start(self, model: nn.Module | None = None) -> None:
        """Begin to measure; `model`: its forward is told from the backward. None: both are one stage."""
        if StepMeter._active is not None:
            StepMeter._active.stop()
        if not torch.cuda.is_available():
            if not StepMeter._has_said_no_gpu:
                print_text("memprof: there is no GPU, so that no memory is measured", sys.stderr)
            StepMeter._has_said_no_gpu = True
            return
        torch.cuda.init()  # the counters are empty before
        StepMeter._active = self
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_optimizer_call),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]
        if model is not None:
            self._hooks += [
                model.register_forward_pre_hook(self.begin_forward),
                model.register_forward_hook(self.begin_backward),
            ]
        torch.cuda.reset_peak_memory_stats()
        if self._explainer is not None:
            self._explainer.start()
            self._excepthook, sys.excepthook = sys.excepthook, self._explain_uncaught

    def stop(self) -> None:
        """Remove all hooks; nothing is measured any longer."""
        if StepMeter._active is not self:
            return
        StepMeter._active = None
        for hook in self._hooks:
            hook.remove()
        if self._explainer is not None:
            if torch.cuda.is_available():  # not after a virtual GPU
                self._explainer.stop()
            if sys.excepthook == self._explain_uncaught:  # else another took its place, and calls it
                sys.excepthook = self._excepthook

    def read(self) -> dict[str, float]:
        """Return what was measured since the last call, by names for a log; empty without a GPU.

        `memprof/peak_gib` and `memprof/STAGE_peak_gib` are peaks of allocated memory, `memprof/reserved_gib` that of
        reserved memory, `memprof/allocated_gib` is what is allocated now. `memprof/growth_mib_per_step` is by how much
        more is allocated at the end of a step than at that of the step before; the first step, which makes the
        optimizer's state, does not count.
        """
        if StepMeter._active is not self:
            return {}
        self._record_stage()
        peaks, self._peaks = self._peaks, {}
        if not peaks:
            return {}
        reserved_bytes, self._reserved_bytes = self._reserved_bytes, 0
        if _FORWARD not in peaks and _OTHER in peaks:
            peaks[_UNSPLIT] = peaks.pop(_OTHER)
        sizes = {"peak": max(peaks.values()), **{f"{stage}_peak": size for stage, size in peaks.items()}}
        sizes |= {"reserved": reserved_bytes, "allocated": self._allocated_bytes}
        figures = {f"memprof/{name}_gib": size / GIB for name, size in sizes.items()}
        if self._num_steps and self._end_bytes is not None and self._baseline_bytes is not None:
            growth_bytes = (self._end_bytes - self._baseline_bytes) / self._num_steps
            figures["memprof/growth_mib_per_step"] = growth_bytes / MIB
            self._baseline_bytes, self._num_steps = self._end_bytes, 0
        return figures

    def begin_forward(self, *_: object) -> None:
        """Begin the stage of a forward, one without gradients if they are switched off; a hook of modules."""
        if self._is_measuring:
            self._enter(_FORWARD if torch.is_grad_enabled() else _INFERENCE)

    def begin_backward(self, *_: object) -> None:
        """Begin the stage of a backward, unless gradients are switched off; a hook of modules."""
        if self._is_measuring and torch.is_grad_enabled():
            self._enter(_BACKWARD)

    def begin_optimizer(self) -> None:
        """Begin the stage of an optimizer's step."""
        if self._is_measuring:
            self._enter(_OPTIMIZER)

    def explain(self, error: BaseException) -> None:
        """Explain an out-of-memory error on stderr and write the snapshot; do nothing for other errors."""
        if self._explainer is not None and StepMeter._active is self and isinstance(error, torch.OutOfMemoryError):
            self._explainer.explain(error)
            self.stop()

    @property
    def _is_measuring(self) -> bool:
        # torch.compile traces the hooks of what it compiles: there they do nothing.
        return StepMeter._active is self and not torch.compiler.is_compiling()

    def _explain_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.explain(error)
        self._excepthook(kind, error, trace)

    def _record_stage(self) -> None:
        """Read the counters of the current stage, and reset their peaks."""
        counters = torch.cuda.memory_stats_as_nested_dict()
        if not counters:  # a virtual GPU that has ended before `stop`
            return
        allocated = counters["allocated_bytes"]["all"]
        self._peaks[self._stage] = max(self._peaks.get(self._stage, 0), allocated["peak"])
        self._reserved_bytes = max(self._reserved_bytes, counters["reserved_bytes"]["all"]["peak"])
        self._allocated_bytes = allocated["current"]
        torch.cuda.reset_peak_memory_stats()

    def _enter(self, stage: str) -> None:
        if stage != self._stage:
            self._record_stage()
            self._stage = stage

    def _begin_optimizer_call(self, *_: object) -> None:
        self._is_in_optimizer = True
        if self._stage != _FORWARD:  # else the forward and the backward are called by the step, as in Lightning
            self._enter(_OPTIMIZER)

    def _end_optimizer(self, *_: object) -> None:
        if not self._is_in_optimizer:  # an optimizer that contains another has ended with it
            return
        self._is_in_optimizer = False
        self._enter(_OTHER)
        self._end_bytes = self._allocated_bytes
        if self._baseline_bytes is None:
            self._baseline_bytes = self._end_bytes
        else:
            self._num_steps += 1
