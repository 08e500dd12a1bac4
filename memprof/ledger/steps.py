"""Training steps: the peak of each step, and the bytes still allocated at its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.trace.events import NONE, PhaseKind, Trace
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step: the end of the previous step to the end of its optimizer step; sizes are allocated bytes."""

    step: int  # From 1.
    peak_bytes: int  # Peak over the step's phases, without evaluation.
    end_bytes: int
    growth_bytes: int  # `end_bytes` minus those of the step before; of the first step, minus those at its beginning.
    # The first event; `end` is exclusive. NONE in a report that was read from JSON.
    begin: int = field(default=NONE, metadata=json_name(None))
    end: int = field(default=NONE, metadata=json_name(None))


def list_training_steps(trace: Trace, allocated: Sequence[int]) -> list[TrainingStep]:
    """Return the completed training steps, in order; `allocated` has the allocated bytes after every event."""
    phases = trace.list_phase_begins()
    ends: dict[int, int] = {}
    without_evaluation = array("q", allocated)
    begins = [*(time for time, _ in phases), len(trace.events)]
    for (time, phase), end in zip(phases, begins[1:], strict=True):
        if phase.kind is PhaseKind.OPTIMIZER_STEP and phase.step:
            ends[phase.step] = end
        elif phase.kind is PhaseKind.EVALUATION:
            without_evaluation[time:end] = array("q", [-1]) * (end - time)
    if not ends:
        return []
    begin = next(time for time, phase in phases if phase.step)
    steps = []
    bytes_before = allocated[begin - 1] if begin else 0
    for step, end in sorted(ends.items(), key=lambda item: item[1]):
        peak = max(without_evaluation[begin:end])  # the optimizer's step is in it
        steps.append(TrainingStep(step, peak, allocated[end - 1], allocated[end - 1] - bytes_before, begin, end))
        bytes_before, begin = allocated[end - 1], end
    return steps
