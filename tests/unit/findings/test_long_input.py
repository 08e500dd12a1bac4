"""One long input is better cut up: where its length is in what decides the peak, and nothing is trained."""

from __future__ import annotations

import pytest

from memprof.findings.proposals import long_input
from memprof.findings.suggestions import Proposal
from memprof.trace.events import PhaseKind, Role
from tests.unit.traces import TraceBuilder

LENGTH = 1 << 20


def proposals(
    *made: tuple[int, ...],
    given: tuple[int, ...] = (1, LENGTH),
    others: int = 0,
    is_trained: bool = False,
) -> list[Proposal]:
    """What is proposed for a call that makes tensors of these shapes, while `others` bytes are live."""
    b = TraceBuilder()
    b.alloc(others)
    if is_trained:
        b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.FORWARD)
    b.enter("net")
    b.new(*given, owner=(Role.INPUT, "x"))
    for shape in made:
        b.new(*shape)
    return list(long_input.propose(b.context()))


def test_what_is_as_long_as_the_input_shrinks() -> None:
    (proposal,) = proposals((1, 64, LENGTH), (1, 64, LENGTH // 4))
    assert (
        proposal.change
        == "process the input [1 x 1048576] of length 1,048,576 in parts of at most 524,288, one after another"
    )
    sizes = [storage.num_bytes for storage in proposal.trace.storages]
    assert sizes[-3:] == [4 * LENGTH, 64 * 4 * LENGTH // 2, 64 * LENGTH // 2]


@pytest.mark.parametrize(
    ("size", "is_along"),
    [
        (LENGTH, True),
        (LENGTH - 1024, True),  # a thousandth is cut off at the edges
        (LENGTH - 1100, False),
        (LENGTH // 16, True),
        (LENGTH // 17, False),
        (LENGTH * 2 // 3, False),
    ],
)
def test_a_fraction_of_the_length(size: int, is_along: bool) -> None:
    assert bool(proposals((512, size))) == is_along


@pytest.mark.parametrize(("length", "is_long"), [(1023, False), (1024, True)])
def test_a_short_input_stays_whole(length: int, is_long: bool) -> None:
    assert bool(proposals((64, length), given=(1, length))) == is_long


@pytest.mark.parametrize(("others", "decides"), [(248 << 20, True), (249 << 20, False)])
def test_it_is_half_of_the_peak(others: int, decides: bool) -> None:
    """252 MiB of the length beside 4 MiB of the input and the others."""
    assert bool(proposals((63, LENGTH), others=others)) == decides


def test_batches_and_training_have_other_changes() -> None:
    assert not proposals((64, LENGTH), given=(2, LENGTH))
    assert not proposals((64, LENGTH), is_trained=True)


@pytest.mark.parametrize(("part", "helps"), [(64, True), (63, False)])
def test_parts_of_a_few_elements_are_no_help(monkeypatch: pytest.MonkeyPatch, part: int, helps: bool) -> None:
    monkeypatch.setattr(long_input, "find_fitting_rows", lambda context, storages, num_rows: part)
    assert bool(proposals((64, LENGTH))) == helps


@pytest.mark.parametrize(("phase", "is_cut"), [(PhaseKind.EVALUATION, True), (PhaseKind.FORWARD, False)])
def test_the_input_of_an_evaluation_beside_a_training(phase: PhaseKind, is_cut: bool) -> None:
    """A forward after the optimizer's step is of the training, where parts would be other samples."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.free(b.new(8, LENGTH))
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.phase(phase, 2)
    b.new(1, LENGTH, owner=(Role.INPUT, "x"))
    b.new(64, LENGTH)
    assert bool(list(long_input.propose(b.context()))) == is_cut


@pytest.mark.parametrize(
    ("other", "is_cut"),
    [
        ((1, 32), True),
        ((1, LENGTH - 2), True),
        ((2, LENGTH), False),  # a batch is the larger one
        ((1, 2 * LENGTH + 4096), False),  # nothing is as long as that
    ],
)
def test_of_several_inputs_the_largest_is_cut_up(other: tuple[int, ...], is_cut: bool) -> None:
    for shapes in ([(1, LENGTH), other], [other, (1, LENGTH)]):
        b = TraceBuilder(PhaseKind.FORWARD)
        for shape in shapes:
            b.new(*shape, owner=(Role.INPUT, ""))
        b.new(64, LENGTH)
        found = list(long_input.propose(b.context()))
        assert [f"of length {LENGTH:,} in" in one.change for one in found] == [True] * is_cut
