"""Builds what several proposals are tried on, and reads what was proposed."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.findings import Context
from memprof.findings.evidence import file_and_line
from memprof.findings.suggestions import Proposal
from memprof.trace.events import ModuleRole, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def listed(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The proposals; a line that one names is its source, whose code the report shows."""
    found = list(proposals)
    for one in found:
        if ".py:" in one.change:
            assert one.source and file_and_line(one.source) in one.change
    return found


def only(proposals: Iterable[Proposal]) -> Proposal:
    (proposal,) = listed(proposals)
    return proposal


def batch(
    *shapes: tuple[int, ...], inputs: tuple[int, ...] = (64, 100), op: str = "aten.mm", trains: bool = True
) -> Context:
    """A forward with a result of each of `shapes`, for inputs of the shape `inputs`."""
    b = TraceBuilder()
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.new(*inputs, owner=(Role.INPUT, ""))
    for shape in shapes:
        b.new(*shape, op=op)
    if trains:
        b.phase(PhaseKind.BACKWARD)
    return b.context()


def layers(*, backward: bool) -> TraceBuilder:
    """Two layers, each with a temporary of 1 MiB, 4 MiB that are saved and a result of 2 MiB."""
    b = TraceBuilder(PhaseKind.FORWARD)
    saved, calls = [], []
    for layer in range(2):
        b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
        calls.append(len(b.trace.events))
        b.free(b.alloc(MIB))
        saved += [b.alloc(4 * MIB), b.alloc(2 * MIB)]
        b.leave()
    if backward:
        b.phase(PhaseKind.BACKWARD)
        for layer in (1, 0):
            b.alloc(MIB, forward_event=calls[layer])
            b.free(*saved[2 * layer : 2 * layer + 2])
    return b
