"""Writes runs by hand in which something piles up from step to step."""

from __future__ import annotations

from collections.abc import Callable

from memprof.trace.events import Holder, PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

MILLION = MIB // 4  # Elements of float32 in a MiB.
KEPT = "train.py:7 main"
LOSSES = Holder(0, "list", "losses", "/x/train.py:9 main", True, None, (), 0, 0, None)


def steps(b: TraceBuilder, number: int, each: Callable[[int], None]) -> None:
    """Training steps, in each of which `each` is called after the forward's own tensors were made."""
    for step in range(1, number + 1):
        b.phase(PhaseKind.FORWARD, step)
        activation = b.new(MILLION)
        each(step)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(activation)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.phase(PhaseKind.OTHER, step)


def kept(number: int = 4, holder: Holder | None = None, elements: int = MILLION) -> TraceBuilder:
    """A run in which each step leaves a tensor behind."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    made: list[int] = []
    steps(b, number, lambda step: made.append(b.new(elements, line=KEPT)))
    if holder is not None:
        b.trace.holders.append(holder._replace(storages=tuple(made[:2])))
    return b
