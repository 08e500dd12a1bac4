"""A decoder whose sizes are small and all different, so that its bytes are counted by hand."""

from __future__ import annotations

from typing import Any

from memprof.estimate.geometry import DecoderGeometry, EstimatedModel
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.tape import Tape, Tensor

# A layer's matrices: q 64 x 64, k and v 64 x 32, o 64 x 64, gate and up 64 x 192, down 192 x 64: 49,152 weights.
TINY = DecoderGeometry("llama", 64, 3, 4, 2, 16, 192, 1000, tied=False)
LINEAR = 3 * 49_152
NORMS = 3 * 2 * 64 + 64
COUNT = 2 * 1000 * 64 + LINEAR + NORMS


def tiny_model(geometry: DecoderGeometry | None = TINY, count: int | None = None) -> EstimatedModel:
    if count is None:
        count = COUNT if geometry is None else geometry.num_parameters
    return EstimatedModel("tiny", count, geometry, {}, "config", "bfloat16")


def plan(method: str, column: str = "bfloat16", **more: Any) -> MethodPlan:
    return MethodPlan(METHOD_BY_KEY[method], column, **more)


def run(tape: Tape, output: Tensor) -> tuple[int, int, int, int]:
    """Drop the output, and run its backward. Return saved bytes and peak of the forward, the bytes of parameters'
    gradients, and the peak of the backward."""
    forward = tape.saved_bytes, tape.peak
    tape.drop(output)
    tape.peak = tape.live
    return (*forward, tape.run_backward(output), tape.peak)
