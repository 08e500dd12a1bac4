"""Training steps of hand-written runs: where they begin and end, and what is theirs."""

from __future__ import annotations

from memprof.ledger.steps import list_training_steps
from memprof.trace.events import PhaseKind
from tests.unit.traces import TraceBuilder

BLOCK = 512


def run(*steps: int, keeps: int = 0) -> TraceBuilder:
    """Steps with an activation of so many blocks, of which each leaves `keeps` tensors of a block behind."""
    b = TraceBuilder()
    b.parameter("weight", BLOCK // 4)
    for number, blocks in enumerate(steps, 1):
        b.phase(PhaseKind.FORWARD, number)
        activation = b.new(blocks * BLOCK // 4)
        for _ in range(keeps):
            b.new(BLOCK // 4, line="train.py:9 main")
        b.phase(PhaseKind.BACKWARD, number)
        b.free(activation)
        b.phase(PhaseKind.OPTIMIZER_STEP, number)
        b.phase(PhaseKind.OTHER, number)
    return b


def steps_of(b: TraceBuilder) -> list[tuple[int, int, int, int]]:
    ledger = b.context().ledger
    steps = list_training_steps(b.trace, ledger.allocated)
    return [(s.step, s.peak_bytes // BLOCK, s.end_bytes // BLOCK, s.growth_bytes // BLOCK) for s in steps]


def test_peaks_and_growth() -> None:
    assert steps_of(run(10, 30, 20)) == [(1, 11, 1, 0), (2, 31, 1, 0), (3, 21, 1, 0)]
    assert steps_of(run(10, 10, keeps=2)) == [(1, 13, 3, 2), (2, 15, 5, 2)]


def test_gradient_accumulation_is_one_step() -> None:
    b = run(10)
    for number in (2, 2):
        b.phase(PhaseKind.FORWARD, number)
        b.free(b.new(40 * BLOCK // 4))
        b.phase(PhaseKind.BACKWARD, number)
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    assert steps_of(b) == [(1, 11, 1, 0), (2, 41, 1, 0)]


def test_evaluation_is_not_the_peak_of_a_step() -> None:
    b = run(10)
    b.phase(PhaseKind.EVALUATION, 2)
    b.free(b.new(90 * BLOCK // 4))
    b.phase(PhaseKind.FORWARD, 2)
    b.free(b.new(5 * BLOCK // 4))
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    assert steps_of(b) == [(1, 11, 1, 0), (2, 6, 1, 0)]


def test_a_step_that_did_not_end_is_none() -> None:
    b = run(10, 10)
    b.phase(PhaseKind.FORWARD, 3)
    b.new(100)
    assert [row[0] for row in steps_of(b)] == [1, 2]
    unfinished = TraceBuilder()
    unfinished.phase(PhaseKind.FORWARD)
    unfinished.new(100)
    assert steps_of(unfinished) == []


def test_steps_are_counted_from_their_first_phase_to_their_last() -> None:
    """What a step frees first, and what it keeps, belong to it; the end is exclusive."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.phases[0] = b.trace.phases[0]._replace(step=1)
    kept = b.new(BLOCK)  # four blocks
    b.phase(PhaseKind.OPTIMIZER_STEP, 1)
    b.new(BLOCK // 4)
    b.phase(PhaseKind.INPUTS, 2)
    b.free(kept)
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    b.phase(PhaseKind.OPTIMIZER_STEP, 0)  # outside steps
    b.new(BLOCK)
    steps = list_training_steps(b.trace, b.context().ledger.allocated)
    assert [(step.step, step.begin, step.end) for step in steps] == [(1, 0, 4), (2, 4, 7)]
    assert [(step.peak_bytes // BLOCK, step.end_bytes // BLOCK) for step in steps] == [(5, 5), (5, 1)]
    assert [step.growth_bytes // BLOCK for step in steps] == [5, -4]


def test_a_step_may_be_evaluation_and_an_optimizer_step() -> None:
    b = run(10)
    b.phase(PhaseKind.EVALUATION, 2)
    b.free(b.new(90 * BLOCK // 4))
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    assert steps_of(b)[1] == (2, 1, 1, 0)
    b.trace.phases[-1] = b.trace.phases[-1]._replace(kind=PhaseKind.EVALUATION)
    b.trace.phases[-2] = b.trace.phases[-2]._replace(kind=PhaseKind.OPTIMIZER_STEP)
    assert steps_of(b)[1] == (2, 91, 1, 0)


def test_what_is_there_before_the_first_step_is_no_growth() -> None:
    b = run(10)
    (step,) = list_training_steps(b.trace, b.context().ledger.allocated)
    assert (step.begin, step.end, step.growth_bytes, step.end_bytes) == (2, 7, 0, BLOCK)
