"""The memory of each step of hand-written runs whose batches differ, by hand, under each setting."""

from __future__ import annotations

import pytest

from memprof.allocator import parse_config, parse_release, replay_in_host_memory, replay_on_gpu
from memprof.ledger.batches import Batches, BatchStep, ReservedOverSteps, build_batches, may_be_larger
from memprof.ledger.steps import list_training_steps
from memprof.spec import TargetSpec
from memprof.trace.events import CPU, PhaseKind
from memprof.trace.facts import Facts, Target
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

EMPTIED = "empty_cache() after each step"


def train(*sizes: int) -> TraceBuilder:
    """Steps with one activation each, of so many MiB."""
    b = TraceBuilder()
    for step, size in enumerate(sizes, 1):
        b.phase(PhaseKind.FORWARD, step)
        activation = b.alloc(size * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(activation)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    return b


def batches_of(b: TraceBuilder, conf: str = "", release: str = "2.13"):
    run = replay_on_gpu(b.trace, None, parse_config(conf), parse_release(release))
    allocated = run.timeline.allocated
    return build_batches(run, allocated, list_training_steps(b.trace, allocated))


@pytest.mark.parametrize(
    ("peaks", "is_told"),
    [
        ((900, 1000, 950, 960), True),
        ((900, 1000, 951, 960), False),  # less than 5% of the highest
        ((900, 1000, 1000, 950, 950), False),  # half of the steps are like others
        ((900, 1000, 1000, 950), True),
        ((100, 1000, 1000, 1000), False),  # the first has no optimizer state
    ],
)
def test_batches_whose_peaks_differ_may_be_larger_later(peaks: tuple[int, ...], is_told: bool) -> None:
    steps = tuple(BatchStep(number, None, peak, peak, 0) for number, peak in enumerate(peaks, 1))
    assert may_be_larger(Batches(None, None, None, steps, ())) == is_told
    assert not may_be_larger(Batches("alpaca", 100.0, 512, steps, ()))


def test_each_step_and_each_setting() -> None:
    """Freed segments of 10 MiB or more serve what is not larger: 10 + 30 + 60 MiB are reserved from the fourth on."""
    found = batches_of(train(10, 30, 20, 60, 40))
    assert found is not None and (found.lengths, found.mean_length, found.longest) == (None, None, None)
    assert found.steps == tuple(
        BatchStep(step, None, peak * MIB, reserved * MIB, unused * MIB)
        for step, peak, reserved, unused in [
            (1, 10, 10, 0), (2, 30, 40, 10), (3, 20, 40, 10), (4, 60, 100, 40), (5, 40, 100, 40),
        ]
    )  # fmt: skip
    assert found.reserved == (
        ReservedOverSteps("baseline", 100 * MIB, 100 * MIB, 58 * MIB, 4),
        # Of an expandable segment, whole units of 20 MiB: 20, 40, 40, 60, 60.
        ReservedOverSteps("expandable_segments:True", 60 * MIB, 60 * MIB, 44 * MIB, 4),
        # 10, 30, 20, 60, 40: 99% of the way from the first to the fifth is 0.96 of that from 40 to 60.
        ReservedOverSteps(EMPTIED, 60 * MIB, round(59.2 * MIB), 32 * MIB, 4),
    )


@pytest.mark.parametrize(
    ("conf", "release", "settings"),
    [
        ("", "2.1", ["baseline", "expandable_segments:True", EMPTIED]),
        ("", "2.0", ["baseline", EMPTIED]),  # which has no expandable segments
        ("expandable_segments:True", "2.1", ["baseline", EMPTIED]),  # which are in use
    ],
)
def test_settings_that_are_compared(conf: str, release: str, settings: list[str]) -> None:
    found = batches_of(train(10, 30, 20, 60, 40), conf, release)
    assert found is not None and [row.how for row in found.reserved] == settings


@pytest.mark.parametrize(
    ("sizes", "is_found"),
    [
        ((10, 20, 30, 40), False),  # fewer than five
        ((10, 20, 30, 40, 50), True),
        ((10, 20, 20, 20, 20), False),  # the first has no optimizer state
        ((20, 20, 20, 20, 10), True),
        ((10, 10, 20, 20, 20), True),
    ],
)
def test_five_steps_that_differ(sizes: tuple[int, ...], is_found: bool) -> None:
    assert (batches_of(train(*sizes)) is not None) == is_found


def test_a_release_without_expandable_segments_has_none_whatever_is_set() -> None:
    found = batches_of(train(10, 30, 20, 60, 40), "expandable_segments:True", "2.0")
    assert found is not None and found.reserved[-1] == ReservedOverSteps(
        EMPTIED, 60 * MIB, round(59.2 * MIB), 32 * MIB, 4
    )


def test_none_in_host_memory_unless_lengths_were_asked_for() -> None:
    b = train(10, 20, 30, 40, 50)
    b.trace.device = CPU
    b.trace.storages = [storage._replace(device=CPU) for storage in b.trace.storages]
    run = replay_in_host_memory(b.trace)
    steps = list_training_steps(b.trace, run.timeline.allocated)
    assert build_batches(run, run.timeline.allocated, steps) is None
    b.trace.facts = Facts(
        target=Target(TargetSpec(model="gpt2", lengths="x"), "gpt2", sequence_lengths=(1, 2, 3, 4, 5))
    )
    found = build_batches(run, run.timeline.allocated, steps)
    assert found is not None and [row.how for row in found.reserved] == ["baseline"]  # there is no cache


def test_lengths_of_a_step_are_those_of_its_batches() -> None:
    """With two micro-batches and an evaluation, a step has three batches."""
    b = train(10, 30)
    spec = TargetSpec(model="gpt2", lengths="x", gradient_accumulation=2, evaluate=True)
    b.trace.facts = Facts(target=Target(spec, "gpt2", sequence_lengths=(5, 9, 7, 3, 2, 4)))
    found = batches_of(b)
    assert found is not None and (found.lengths, found.mean_length, found.longest) == ("x", 5.0, 9)
    assert [(step.step, step.sequence_length) for step in found.steps] == [(1, 9), (2, 4)]
    assert [step.reserved_bytes for step in found.steps] == [10 * MIB, 40 * MIB]
    # Two steps have a p99 too, 0.99 of the way from one to the other.
    assert found.reserved[0].p99_bytes == round((10 + 0.99 * 30) * MIB)


@pytest.mark.parametrize(("lengths", "sequence_lengths"), [(None, (5, 9)), ("x", ())])
def test_without_lengths_steps_are_the_programs_own(lengths: str | None, sequence_lengths: tuple[int, ...]) -> None:
    b = train(10, 30)
    target = Target(TargetSpec(model="gpt2", lengths=lengths), "gpt2", sequence_lengths=sequence_lengths)
    b.trace.facts = Facts(target=target)
    assert batches_of(b) is None


def test_a_step_is_its_phases() -> None:
    """What is before the first step belongs to none, and one step alone has no spread."""
    b = TraceBuilder()
    b.free(b.alloc(50 * MIB))
    b.empty_cache()
    b.phase(PhaseKind.INPUTS, 1)
    b.phase(PhaseKind.FORWARD, 1)
    b.alloc(20 * MIB)
    b.trace.facts = Facts(target=Target(TargetSpec(model="gpt2", lengths="x"), "gpt2", sequence_lengths=(8,)))
    found = batches_of(b)
    assert found is not None and found.steps == (BatchStep(1, 8, 20 * MIB, 20 * MIB, 0),)
    assert found.reserved[0] == ReservedOverSteps("baseline", 20 * MIB, 20 * MIB, 20 * MIB, 1)
