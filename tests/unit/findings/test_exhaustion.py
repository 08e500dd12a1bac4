"""When memory that grows runs out, in hand-written traces: each step is worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.findings import Severity
from memprof.findings.exhaustion import MAX_STEPS, Growth, predict_growth
from memprof.findings.memory_growth import find
from memprof.trace.events import Role
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.findings.test_growth import KEPT, LOSSES, MILLION, kept, steps
from tests.unit.traces import TraceBuilder

# A tensor of 1 MiB is of the small pool: two in each segment of 2 MiB, but one beside the weight. So 100 MiB hold 99
# of them, and in step 99 the activation is the hundredth.
FULL_AT = 99


def stopped(b: TraceBuilder, ended: str = "steps") -> TraceBuilder:
    """The run of a script that was stopped."""
    program = ProgramFacts(("train.py",), ended, 0, 4, ())
    b.trace.facts = dataclasses.replace(b.trace.facts, command="run", program=program)
    return b


def test_it_runs_out_in_the_step_that_was_worked_out() -> None:
    growth = predict_growth(stopped(kept(4)).context(100 * MIB))
    assert growth == Growth(MIB, MIB, 4, None, FULL_AT)
    assert growth.runs_out


def test_a_program_that_came_to_its_end_fits() -> None:
    growth = predict_growth(stopped(kept(4), "exit").context(100 * MIB))
    assert growth == Growth(MIB, MIB, 4, 4, FULL_AT) and not growth.runs_out
    of_ones_own = predict_growth(kept(4).context(100 * MIB))  # in a `with memprof.virtual_gpu()`
    assert of_ones_own is not None and not of_ones_own.runs_out


@pytest.mark.parametrize(("program_steps", "runs_out"), [(98, False), (99, True), (None, True)])
def test_the_step_itself_counts(program_steps: int | None, runs_out: bool) -> None:
    assert Growth(MIB, MIB, 4, program_steps, FULL_AT).runs_out is runs_out


def test_the_finding_is_an_error_where_memory_runs_out_and_names_the_step() -> None:
    (finding,) = find(stopped(kept(4, LOSSES)).context(100 * MIB))
    assert finding.severity is Severity.ERROR
    assert "memory runs out at about step 99" in [one.text for one in finding.evidence]
    (fits,) = find(stopped(kept(4, LOSSES), "exit").context(100 * MIB))
    assert fits.severity is Severity.WARNING


def test_less_than_a_metric_is_no_growth() -> None:
    quarter = MILLION // 16  # 64 KiB
    assert predict_growth(stopped(kept(4, elements=quarter)).context(100 * MIB)) is not None
    assert predict_growth(stopped(kept(4, elements=quarter - 128)).context(100 * MIB)) is None


def test_what_lasts_for_longer_than_any_run_is_no_verdict() -> None:
    growth = predict_growth(stopped(kept(4, elements=MILLION // 16)).context((MAX_STEPS >> 3) * MIB))
    assert growth is not None and growth.runs_out_step is None and not growth.runs_out


def test_a_container_with_a_limit_fills_up_or_runs_out() -> None:
    fits = predict_growth(stopped(kept(4, LOSSES._replace(kind="deque", limit=90))).context(100 * MIB))
    assert fits is not None and fits.runs_out_step is None
    full = predict_growth(stopped(kept(4, LOSSES._replace(kind="deque", limit=99))).context(100 * MIB))
    assert full is not None and full.runs_out_step == FULL_AT


def test_what_steps_hand_on_is_not_counted_twice() -> None:
    """The logits of the step before live on until the next has made its own: one more at each peak, and no growth."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    before: list[int] = []

    def each(step: int) -> None:
        b.new(MILLION, line=KEPT)
        before.append(b.new(MILLION, line="train.py:8 main", op="aten.add"))
        b.free(*before[-2:-1])

    steps(b, 4, each)
    growth = predict_growth(stopped(b).context(100 * MIB))
    # Beside what is kept: the old logits, the new and the activation.
    assert growth is not None and growth.runs_out_step == FULL_AT - 2


def test_copies_made_anew_are_growth_where_there_are_always_so_many_more() -> None:
    """As of a metric that clones its list in each step: while it does, the old and the new are live together."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    held: list[int] = []

    def each(step: int) -> None:
        anew = [b.new(MILLION, line=KEPT, op="aten.clone") for _ in range(step)]
        b.free(*held)
        held[:] = anew

    steps(b, 6, each)
    growth = predict_growth(stopped(b).context(1000 * MIB))
    assert growth is not None and growth.bytes_per_step == MIB and growth.peak_bytes_per_step == 2 * MIB
    # In step n there are n - 1 old ones, n new ones and the activation.
    assert growth.runs_out_step is not None and abs(growth.runs_out_step - 500) <= 5


def test_parts_that_happen_to_be_more_each_time_are_no_growth() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    held: list[int] = []

    def each(step: int) -> None:
        anew = [b.new(MILLION, line=KEPT, op="aten.clone") for _ in range((2, 3, 5, 6)[step - 1])]
        b.free(*held)
        held[:] = anew

    steps(b, 4, each)
    assert predict_growth(stopped(b).context(1000 * MIB)) is None


def test_models_pile_up_and_state_that_is_made_late_does_not() -> None:
    def run(role: Role) -> Growth | None:
        b = TraceBuilder()
        b.parameter("weight", 100)
        steps(b, 5, lambda step: b.new(MILLION, line=KEPT, owner=(role, f"fold{step}.weight")) and None)
        return predict_growth(stopped(b).context(100 * MIB))

    further = run(Role.PARAMETER)
    assert further is not None and further.bytes_per_step == MIB
    assert run(Role.OPTIMIZER_STATE) is None


def test_a_run_that_was_refused_has_no_growth_left_to_tell() -> None:
    assert predict_growth(stopped(kept(6)).context(6 * MIB)) is None


def test_what_every_third_step_leaves_is_counted_by_the_step() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 12, lambda step: b.new(3 * MILLION // 4, line=KEPT) and None if step % 3 == 0 else None)
    growth = predict_growth(stopped(b).context(100 * MIB))
    # The lasting bytes rise at the ends of steps 4, 7 and 10, so that nine steps from the third on add three tensors.
    assert growth is not None and growth.bytes_per_step == 3 * (3 * MIB // 4) // 9
