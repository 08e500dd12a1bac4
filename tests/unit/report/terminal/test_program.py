"""The line that says how a script ended, and how far it had come."""

from __future__ import annotations

import pytest

from memprof.flows.account import analyze
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(
    ("ended", "steps", "words"),
    [
        ("error", 0, "a.py: failed by itself before any training step"),
        ("error", 1, "a.py: failed by itself after training step 1 began"),
        ("refused", 0, "a.py: stopped where memory ran out; what it does after that was not run "),
        ("timeout", 12, "a.py: stopped by --timeout after training step 12 began"),
        ("exit", 0, "a.py: ran to its end "),
        ("exit", 1, "a.py: ran to its end, 1 training step "),
    ],
)
def test_the_end_of_a_script(ended: str, steps: int, words: str) -> None:
    assert words in heading(ProgramFacts(("a.py",), ended, None, steps, ()))


@pytest.mark.parametrize(("steps", "counted"), [(0, ""), (1, ", 1 training step"), (2, ", 2 training steps")])
def test_steps_are_counted_where_there_are_any(steps: int, counted: str) -> None:
    program = ProgramFacts(("a.py",), "exit", 3, steps, ())
    assert f"a.py: ended by itself with exit code 3{counted} " in heading(program)


def heading(program: ProgramFacts) -> str:
    """What stands on the screen of a forward, on one line."""
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 1 << 33), program=program)
    b.phase(PhaseKind.FORWARD)
    b.free(b.new(1 << 20))
    return " ".join(to_text(render(analyze(b.trace), quiet=False)).split()) + " "
