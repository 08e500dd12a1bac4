"""When memory that grows runs out, in hand-written traces: each step is worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.findings import Severity, exhaustion
from memprof.findings.exhaustion import MAX_STEPS, Growth, predict_growth
from memprof.findings.memory_growth import find
from memprof.ledger.steps import list_training_steps
from memprof.trace.events import PhaseKind, Role
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.findings.growing import KEPT, LOSSES, MILLION, kept, steps
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


# -- function by function --------------------------------------------------------------------------------------------


def test_without_a_gpu_or_in_memprofs_own_loop_nothing_is_predicted() -> None:
    assert predict_growth(stopped(kept(4)).context()) is None
    b = stopped(kept(4))
    b.trace.facts = dataclasses.replace(b.trace.facts, command="profile")
    assert predict_growth(b.context(100 * MIB)) is None


@pytest.mark.parametrize(
    ("program_steps", "runs_out_step", "runs_out"), [(None, None, False), (5, None, False), (None, 5, True)]
)
def test_memory_runs_out_if_a_step_is_known(
    program_steps: int | None, runs_out_step: int | None, runs_out: bool
) -> None:
    assert Growth(MIB, MIB, 4, program_steps, runs_out_step).runs_out is runs_out


def test_the_steps_of_a_program_are_those_it_has_planned_until_it_ends() -> None:
    b = stopped(kept(4))
    assert b.trace.facts.program is not None
    program = dataclasses.replace(b.trace.facts.program, planned_steps=50)
    b.trace.facts = dataclasses.replace(b.trace.facts, program=program)
    growth = predict_growth(b.context(100 * MIB))
    assert growth is not None and (growth.program_steps, growth.steps_seen) == (50, 4)


def forecasts(b: TraceBuilder) -> list[exhaustion._Forecast]:
    context = b.context(1000 * MIB)
    return exhaustion._forecast_leaks(context, list_training_steps(b.trace, context.ledger.allocated))


def test_later_steps_add_what_the_recorded_ones_have_added_in_turn() -> None:
    """But for the first, whose tensors may be others'."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 5, lambda step: [b.new(MILLION * (1 + step % 2), line=KEPT) for _ in range(step % 3)] and None)
    (forecast,) = forecasts(b)
    # Steps 2 to 5 add two of 1 MiB, none, one of 1 MiB and two of 2 MiB.
    assert forecast.sizes == ((MIB, MIB), (), (MIB,), (2 * MIB, 2 * MIB))
    added = [forecast.get_added_sizes(step, 5) for step in range(6, 11)]
    assert added == [(MIB, MIB), (), (MIB,), (2 * MIB, 2 * MIB), (MIB, MIB)]
    assert forecast.last_step is None


def test_what_a_step_makes_first_is_of_that_step() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        b.new(step * MILLION, line=KEPT)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    assert forecasts(b)[0].sizes == ((2 * MIB,), (3 * MIB,), (4 * MIB,))


@pytest.mark.parametrize(("limit", "last_step"), [(None, None), (4, "full"), (5, 5), (9, 9)])
def test_a_container_is_full_at_its_limit(limit: int | None, last_step: int | str | None) -> None:
    """Four steps have added one each."""
    found = forecasts(kept(4, LOSSES._replace(limit=limit)))
    assert [one.last_step for one in found] == ([] if last_step == "full" else [last_step])
    for one in found:
        assert one.get_added_sizes(5, 4) == (MIB,)
        assert bool(one.get_added_sizes(6, 4)) == (last_step != 5)


def test_two_tensors_a_step_fill_a_container_twice_as_fast() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    made: list[int] = []
    steps(b, 4, lambda step: made.extend(b.new(MILLION, line=KEPT) for _ in range(2)))
    b.trace.holders.append(LOSSES._replace(storages=tuple(made[:2]), limit=21))
    assert [one.last_step for one in forecasts(b)] == [11]  # of 10.5


@pytest.mark.parametrize(("length", "last_step"), [(1, 84), (4, 21), (5, 17)])
def test_the_items_of_a_container_fill_it_and_not_their_tensors(length: int, last_step: int) -> None:
    """Of 21, so many were there after four steps."""
    b = kept(4, LOSSES._replace(limit=21, length=length))
    b.trace.holders[0] = b.trace.holders[0]._replace(event=len(b.trace.events))
    assert [one.last_step for one in forecasts(b)] == [last_step]


@pytest.mark.parametrize("failing", [5, 6, 90, 99, 100, 101])
def test_bisection_ends_at_the_first_failing_step_or_within_a_hundredth(failing: int) -> None:
    asked: list[int] = []

    class Continuation:
        def fits_until(self, step: int) -> bool:
            asked.append(step)
            return step < failing

    found = exhaustion._bisect_failing_step(Continuation(), 5, 100)  # type: ignore[arg-type]
    assert found == (None if failing == 101 else failing)
    assert asked[:2] == [100, 90][: 1 if failing == 101 else 2]


def test_bisection_of_many_steps_stops_within_a_hundredth() -> None:
    class Continuation:
        def fits_until(self, step: int) -> bool:
            return step < 7777

    found = exhaustion._bisect_failing_step(Continuation(), 5, 10_000)  # type: ignore[arg-type]
    assert found is not None and 7777 <= found <= 7777 * 1.01 and found != 7777


@pytest.mark.parametrize(("usable_mib", "fits"), [(11, False), (12, True)])
def test_a_later_step_has_what_the_steps_before_it_add(usable_mib: int, fits: bool) -> None:
    """Step 9: what it and eight before have kept, the activation and the weight: eleven tensors, two to 2 MiB."""
    b = stopped(kept(4))
    context = b.context(usable_mib * MIB)
    recorded = list_training_steps(b.trace, context.ledger.allocated)
    leaks = exhaustion._forecast_leaks(context, recorded)
    continuation = exhaustion._Continuation(context, recorded[-1], leaks, recorded[-1])
    assert continuation.fits_until(9) == fits


@pytest.mark.parametrize(("usable_mib", "fits"), [(320, True), (318, False)])
def test_steps_between_add_what_is_their_turn(usable_mib: int, fits: bool) -> None:
    """Steps 1 to 4 have kept 20, 40, 60 and 80 MiB; step 5 adds 40 as the second, and 6 is the fourth again."""
    b = TraceBuilder()
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        b.new(step * 20 * MILLION, line=KEPT)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    context = b.context(usable_mib * MIB)
    recorded = list_training_steps(b.trace, context.ledger.allocated)
    leaks = exhaustion._forecast_leaks(context, recorded)
    assert exhaustion._Continuation(context, recorded[-1], leaks, recorded[-1]).fits_until(6) == fits
