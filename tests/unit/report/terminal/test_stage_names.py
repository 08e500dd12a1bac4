"""Names of stages on a terminal are plain words, and a script without a training step has no step."""

import pytest

from memprof.flows.account import analyze
from memprof.ledger.stages import describe_name
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.report.terminal.stage_names import describe_moment, describe_stage, describe_step
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer 3", "layer 3"), ("zero_grad", "zero_grad"), ("own code", "code outside modules"),
        ("parameters", "setup"), ("output", "code outside modules"), ("5 Sequential", "module 5 (Sequential)"),
        ("encoder.blocks ModuleList", "encoder.blocks (ModuleList)"),
        ("evaluation own code", "evaluation code outside modules"),
        ("evaluation 0 Linear", "evaluation module 0 (Linear)"),
    ],
)  # fmt: skip
def test_plain_words(name: str, words: str) -> None:
    assert describe_name(name) == words


@pytest.mark.parametrize(
    ("step", "text"), [(0, "setup"), (1, "setup"), (2, "setup after step 1"), (7, "setup after step 6")]
)
def test_a_model_may_be_built_after_steps(step: int, text: str) -> None:
    assert describe_stage("parameters", step) == text


@pytest.mark.parametrize(("num_steps", "suffix"), [(0, ""), (1, " of step 1")])
@pytest.mark.parametrize(
    ("ended", "title"),
    [
        ("refused", "48.00 MiB of tensors, the failed allocation included"),
        ("exit", "At the peak, 48.00 MiB of tensors in"),
    ],
)
def test_the_stage_of_the_peak(num_steps: int, suffix: str, ended: str, title: str) -> None:
    """The peak has the allocation that failed, and a script that trains nothing has no step."""
    b = TraceBuilder()
    program = ProgramFacts(("a.py",), ended, None, num_steps, ())
    b.trace.facts = Facts(device=DeviceFacts("A", 40 * MIB, usable_bytes=40 * MIB), program=program)
    b.phase(PhaseKind.BACKWARD)
    b.new(6 * MIB)
    b.new(6 * MIB)  # of 4 bytes each
    text = " ".join(to_text(render(analyze(b.trace))).split())
    assert f"{title}{f' backward{suffix}' * (ended == 'exit')} " in text
    assert f"runs out of memory in backward{suffix}, when" in text


def test_what_comes_after_the_last_step_is_none() -> None:
    """An evaluation at the end of a script is recorded as if it began one more step."""
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 99 * MIB), program=ProgramFacts(("a.py",), "exit", None, 2, ()))
    for step in (1, 2, 3):
        b.phase(PhaseKind.FORWARD, step)
        b.free(b.new(step * MIB))
    document = analyze(b.trace)
    assert [describe_step(document, step) for step in (0, 1, 2, 3)] == ["", "step 1", "step 2", "after step 2"]
    assert describe_moment(document, "loss", 2) == "loss of step 2"
    assert describe_moment(document, "loss", 3) == "loss after step 2"
    assert describe_moment(document, "evaluation loss", 3) == "loss of the evaluation"
