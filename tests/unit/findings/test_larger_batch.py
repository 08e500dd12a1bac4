"""One step whose batch is larger than those of the others: shapes, line and bytes, by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from memprof.findings.finding import Finding, Severity
from memprof.findings.larger_batch import find
from memprof.spec import TargetSpec
from memprof.trace.events import EventKind, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

ROW = MIB // 4  # float32 values, so that a row is one MiB
WEIGHT = 20 * MIB
LINE = "x/train.py:4 main"


def steps(rows: Iterable[int], *, line: str = LINE, row: tuple[int, ...] = (ROW,)) -> TraceBuilder:
    """Each step is given rows of one MiB, and its forward allocates twice that."""
    b = TraceBuilder()
    b.parameter("weight", WEIGHT // 4)
    for step, count in enumerate(rows, 1):
        batch = b.new(count, *row, op="aten._to_copy", line=line, owner=(Role.INPUT, ""))
        b.phase(PhaseKind.FORWARD, step)
        hidden = b.alloc(2 * count * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(batch, hidden)
    return b


def found(b: TraceBuilder, usable_bytes: int | None = None) -> Finding | None:
    return next(iter(find(b.context(usable_bytes))), None)


def test_both_shapes_their_line_and_what_the_other_steps_allocate() -> None:
    finding = found(steps([20, 20, 120, 20]), 300 * MIB)
    assert finding is not None
    assert finding.title == (
        f"The batch of step 3 is [120 x {ROW}] (x/train.py:4), the median one [20 x {ROW}]; the other steps "
        "allocate at most 80.00 MiB"
    )
    assert (finding.num_bytes, finding.severity) == (300 * MIB, Severity.WARNING)
    assert finding.evidence[0].text.startswith("fix at x/train.py:4: ") and finding.evidence[0].source == LINE


@pytest.mark.parametrize(("usable_mib", "decides"), [(80, True), (79, False), (400, False)])
def test_it_decides_where_the_other_steps_fit(usable_mib: int, *, decides: bool) -> None:
    finding = found(steps([20, 20, 120, 20]), usable_mib * MIB)
    assert finding is not None and finding.is_decisive is decides


def test_where_the_run_fits_it_is_a_note() -> None:
    finding = found(steps([20, 20, 120, 20]), 400 * MIB)
    assert finding is not None and finding.severity is Severity.NOTE


@pytest.mark.parametrize(("rows", "is_told"), [(118, False), (120, True), (122, True)])
def test_half_as_large_again_as_the_median(rows: int, *, is_told: bool) -> None:
    assert (found(steps([40, 80, rows, 80])) is not None) is is_told


@pytest.mark.parametrize(("others", "is_told"), [(2, False), (3, True)])
def test_three_other_steps(others: int, *, is_told: bool) -> None:
    assert (found(steps([*[20] * others, 120])) is not None) is is_told


def test_of_batches_that_grow_slowly_the_last_is_no_exception() -> None:
    """It is twice the median, and its peak less than a twentieth above that of the one before."""
    assert found(steps(range(20, 122, 2))) is None


@pytest.mark.parametrize(("rows", "is_told"), [([20, 40, 80, 160], False), ([20, 20, 80, 160], True)])
def test_where_each_is_larger_than_the_one_before_none_is_an_exception(rows: list[int], *, is_told: bool) -> None:
    """As in a search for the largest batch."""
    assert (found(steps(rows)) is not None) is is_told


def test_what_another_line_makes_is_no_counterpart() -> None:
    b = steps([20, 20, 20, 20])
    b.new(120, ROW, op="aten._to_copy", line="x/evaluate.py:7 score", owner=(Role.INPUT, ""))
    b.phase(PhaseKind.FORWARD, 5)
    assert found(b) is None


def test_the_batches_of_a_spec_are_as_it_says() -> None:
    assert not find(steps([20, 20, 120, 20]).context(None, spec=TargetSpec(model="gpt2")))


@pytest.mark.parametrize(("row", "word"), [((1, 512, 512), "size of the images"), ((512, 512), "length")])
def test_images_have_a_size_and_texts_a_length(row: tuple[int, ...], word: str) -> None:
    finding = found(steps([20, 20, 120, 20], row=row))
    assert finding is not None and word in finding.evidence[0].text


@pytest.mark.parametrize(("large", "word"), [((512, 600), "the length"), ((600, 600), "size of the images")])
def test_spectrograms_differ_in_their_length(large: tuple[int, int], word: str) -> None:
    b = TraceBuilder()
    b.parameter("weight", WEIGHT // 4)
    for step, size in enumerate(((512, 300), (512, 300), large, (512, 300)), 1):
        batch = b.new(20, 1, *size, op="aten._to_copy", line=LINE, owner=(Role.INPUT, ""))
        b.phase(PhaseKind.FORWARD, step)
        hidden = b.new(2000, *size)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(batch, hidden)
    finding = found(b)
    assert finding is not None and word in finding.evidence[0].text


@pytest.mark.parametrize(
    ("rows", "is_told"),
    [
        ([20, 30, 40, 50], True),
        ([20, 30, 40], False),  # may be chance
        ([20, 40, 60], True),
        ([20, 40], False),
        ([20, 40, 80, 160], False),  # a search
        ([40, 40, 40, 40], False),
    ],
)
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_batch_that_grows_until_memory_runs_out(rows: list[int], is_told: bool, is_cut: bool) -> None:
    """The first step allocates the weight and three times its rows."""
    b = steps([row * 2 for row in rows])
    b.trace.ended_out_of_memory = is_cut
    finding = found(b, (10 + 6 * rows[-1]) * MIB)
    is_growth = finding is not None and finding.title.startswith("The batch grows")
    assert is_growth == (is_told and is_cut)
    if finding is not None and is_growth:
        shapes = [f"[{2 * row} x {ROW}]" for row in rows]
        shapes[2:-1] = ["..."] * (len(rows) > 3)
        assert finding.title == (
            f"The batch grows in each step: {', '.join(shapes)} in step {len(rows)} (x/train.py:4); step 1 "
            "allocates at most 140.00 MiB"
        )
        assert (finding.num_bytes, finding.is_decisive) == (6 * (rows[-1] - rows[0]) * MIB, True)
        assert finding.evidence[0].source == LINE


def lengths(sizes: Iterable[int]) -> TraceBuilder:
    """Each step is given so many MiB, and its forward allocates twice that; memory runs out in the last."""
    b = TraceBuilder()
    for step, size in enumerate(sizes, 1):
        batch = b.new(4, size, ROW // 4, op="aten._to_copy", line=LINE, owner=(Role.INPUT, ""))
        b.phase(PhaseKind.FORWARD, step)
        hidden = b.alloc(2 * size * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(batch, hidden)
    while b.trace.events[-1].ref != hidden or b.trace.events[-1].kind is not EventKind.ALLOC:
        b.trace.events.pop()
    b.trace.ended_out_of_memory = True
    return b


@pytest.mark.parametrize(("last", "is_told"), [(149, False), (150, True)])
def test_lengths_that_grow_until_memory_runs_out(last: int, *, is_told: bool) -> None:
    """Sorted by length: the steps with at most the median one's fit."""
    finding = found(lengths([80, 90, 100, 110, 120, last]), 400 * MIB)
    assert (finding is not None) == is_told
    if finding is not None:
        assert finding.is_decisive
        assert finding.title.endswith("steps up to that allocate at most 300.00 MiB")
