"""The line on a failed allocation has what torch's message advises, where that helps."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.flows.account import analyze
from memprof.report.terminal.brief import render
from memprof.report.terminal.console import to_text
from memprof.trace.events import PhaseKind
from memprof.trace.facts import AllocatorFacts, DeviceFacts, Facts, ProgramFacts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


@pytest.mark.parametrize(
    ("frees", "config", "is_told"),
    [(True, None, True), (False, None, False), (False, "expandable_segments:True", False)],
)
def test_torch_advises_expandable_segments(frees: bool, config: str | None, is_told: bool) -> None:
    """Two segments of 20 MiB with two tensors of 9 each, on a GPU of 50: one of 15 fails, though 18 lie side by side in
    one segment that expands."""
    b = TraceBuilder()
    b.trace.facts = Facts(
        device=DeviceFacts("A", 50 * MIB, usable_bytes=50 * MIB),
        program=ProgramFacts(("a.py",), "refused", None, 1, ()),
        allocator=AllocatorFacts(alloc_conf=config),
    )
    b.trace.ended_out_of_memory = True
    b.phase(PhaseKind.BACKWARD)
    quarter_mib = MIB // 4
    tensors = [b.new(9 * quarter_mib) for _ in range(4)]
    if frees:
        b.free(tensors[1], tensors[2])
    b.new(15 * quarter_mib)
    document = analyze(b.trace)
    assert "torch's advice" not in to_text(render(document))  # a change is known that helps
    screen = " ".join(to_text(render(dataclasses.replace(document, findings=()))).split())
    assert "- failed allocation: 16.00 MiB, [3932160] float32" in screen
    advice = "; torch's advice, expandable_segments:True, lets this one succeed, and maybe not a later one"
    assert (advice in screen) is is_told and ("torch's advice" in screen) is is_told


def test_a_segment_is_told_from_the_tensor_that_it_is_for() -> None:
    b = TraceBuilder()
    facts = DeviceFacts("A", 50 * MIB, usable_bytes=50 * MIB), ProgramFacts(("a.py",), "refused", None, 1, ())
    b.trace.facts, b.trace.ended_out_of_memory = Facts(device=facts[0], program=facts[1]), True
    b.phase(PhaseKind.BACKWARD)
    b.new(10 * MIB)
    b.new(MIB // 2)  # elements: 2 MiB
    screen = " ".join(to_text(render(analyze(b.trace))).split())
    assert "- failed allocation: [524288] float32" in screen and ", for which a segment of 20.00 MiB is" in screen
