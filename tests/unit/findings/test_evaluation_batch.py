"""An evaluation whose batch is larger than those of training: shapes, line and bytes, by hand."""

from __future__ import annotations

import pytest

from memprof.findings.evaluation_batch import find
from memprof.findings.finding import Finding, Severity
from memprof.spec import TargetSpec
from memprof.trace.events import PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

ROW = MIB // 4  # float32 values, so that a row is one MiB
LINE = "x/train.py:9 main"


def evaluated(
    rows: int, *, trains: bool = True, columns: int = ROW, in_training: int = 20, role: Role = Role.INPUT
) -> TraceBuilder:
    """Three steps of 20 MiB of inputs and twice that in the forward, and an evaluation of so many rows."""
    b = TraceBuilder()
    b.parameter("weight", 20 * ROW)
    for step in (1, 2, 3):
        batch = b.new(in_training, ROW, op="aten._to_copy", line="x/train.py:4 main", owner=(Role.INPUT, ""))
        b.phase(PhaseKind.FORWARD, step)
        hidden = b.alloc(2 * in_training * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(batch, hidden)
        b.phase(PhaseKind.OPTIMIZER_STEP if trains else PhaseKind.OTHER, step)
    b.phase(PhaseKind.OTHER)
    b.new(rows, columns, op="aten._to_copy", line=LINE, owner=(role, ""))
    b.phase(PhaseKind.EVALUATION)
    b.alloc(2 * rows * MIB)
    return b


def found(b: TraceBuilder, usable_bytes: int | None = None) -> Finding | None:
    return next(iter(find(b.context(usable_bytes))), None)


def test_both_shapes_the_line_and_what_training_allocates() -> None:
    finding = found(evaluated(120), 300 * MIB)
    assert finding is not None
    assert finding.title == (
        f"A batch of the evaluation is [120 x {ROW}] (x/train.py:9), one of training [20 x {ROW}]; training allocates "
        "at most 140.00 MiB"
    )
    assert (finding.num_bytes, finding.severity) == (240 * MIB, Severity.WARNING)
    assert finding.evidence[0].text.startswith("fix at x/train.py:9: ") and finding.evidence[0].source == LINE


@pytest.mark.parametrize(("usable_mib", "decides"), [(139, False), (142, True), (300, True), (400, False)])
def test_it_is_the_cause_where_training_fits(usable_mib: int, decides: bool) -> None:
    """Training takes 140 MiB, and all 380."""
    finding = found(evaluated(120), usable_mib * MIB)
    assert finding is not None and finding.is_decisive == decides


def test_where_the_run_fits_it_is_a_note() -> None:
    finding = found(evaluated(120), 400 * MIB)
    assert finding is not None and finding.severity is Severity.NOTE


@pytest.mark.parametrize(("rows", "is_told"), [(119, False), (120, True), (121, True)])
def test_half_as_large_again_as_in_training(rows: int, *, is_told: bool) -> None:
    assert (found(evaluated(rows, in_training=80)) is not None) is is_told


@pytest.mark.parametrize(
    ("shape", "usual", "is_told"),
    [
        ((8, 3, 256, 256), (8, 3, 128, 128), True),
        ((8, 1, 256, 256), (8, 3, 128, 128), False),
        ((8, 3, 65536), (8, 3, 128, 128), False),
        ((8, 3, 65536), (8, 3, 16384), False),  # no images, no sequences
        ((8, 16384, 3), (8, 4096, 3), True),
        ((8, 16384), (8, 4096), False),
    ],
)
def test_images_that_training_crops(shape: tuple[int, ...], usual: tuple[int, ...], *, is_told: bool) -> None:
    """Those of the evaluation are four times as large, of equally many channels."""
    b = TraceBuilder()
    for step in (1, 2, 3):
        batch = b.new(*usual, op="aten._to_copy", owner=(Role.INPUT, ""))
        b.phase(PhaseKind.FORWARD, step)
        hidden = b.alloc(20 * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(batch, hidden)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    b.phase(PhaseKind.OTHER)
    b.new(*shape, op="aten._to_copy", line=LINE, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.EVALUATION)
    b.alloc(200 * MIB)
    finding = found(b)
    assert (finding is not None) == is_told
    assert finding is None or "samples at a time" in finding.evidence[0].text


@pytest.mark.parametrize(
    ("shape", "usual", "figures"),
    [
        ((4, 3, 256, 256), (8, 3, 128, 128), "at most 2 samples"),
        ((8, 3, 256, 256), (4, 3, 128, 128), "at most 1 sample "),
        ((1, 3, 256, 256), (2, 3, 128, 128), "in tiles"),
        ((1, 190, 3, 300), (1, 48, 3, 300), "at most 48 of its 190 "),
        ((2, 190, 3, 300), (3, 48, 3, 300), "at most 144 of its 190 "),
    ],
)
def test_what_is_as_large_as_a_batch_of_training(shape: tuple[int, ...], usual: tuple[int, ...], figures: str) -> None:
    """Two images of the sample, of which the larger one counts."""
    b = TraceBuilder()
    for step in (1, 2, 3):
        small = b.new(*usual[:2], *(size // 2 for size in usual[2:]), owner=(Role.INPUT, ""))
        batch = b.new(*usual, op="aten._to_copy", owner=(Role.INPUT, ""))
        b.phase(PhaseKind.FORWARD, step)
        b.free(batch, small)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    b.phase(PhaseKind.OTHER)
    b.new(*shape, op="aten._to_copy", line=LINE, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.EVALUATION)
    b.alloc(200 * MIB)
    finding = found(b)
    assert finding is not None and figures in finding.evidence[0].text
    assert f"[{' x '.join(map(str, usual))}]" in finding.title


def test_a_batch_that_is_gone_does_not_decide_the_peak() -> None:
    """What the evaluation has put together does, as the similarities of all embeddings."""
    b = evaluated(120)
    batch = next(index for index, storage in enumerate(b.trace.storages) if storage.shape == (120, ROW))
    b.free(batch)
    b.alloc(400 * MIB)
    assert found(b) is None


def test_gradients_of_inputs_alone_are_no_training() -> None:
    assert found(evaluated(120, trains=False)) is None


@pytest.mark.parametrize("change", [{"columns": ROW // 2}, {"role": Role.BUFFER}])
def test_what_is_no_batch_of_the_same_kind_is_no_counterpart(change: dict[str, int | Role]) -> None:
    assert found(evaluated(240, **change)) is None  # type: ignore[arg-type]


def test_what_comes_after_the_error_is_not_training() -> None:
    b = evaluated(120)
    b.phase(PhaseKind.OTHER)
    b.alloc(MIB, device="cpu")
    assert found(b, 300 * MIB) is None  # the program goes on, with as much memory
    b.trace.ended_out_of_memory = True
    cut = found(b, 300 * MIB)
    assert cut is not None and "at most 140.00 MiB" in cut.title


def test_silent_where_the_peak_is_in_training_and_on_a_workload_of_memprof() -> None:
    b = evaluated(120)
    b.phase(PhaseKind.FORWARD, 4)
    b.alloc(MIB)
    assert found(b) is None
    b = evaluated(120)
    context = b.context()
    assert find(context)
    object.__setattr__(context, "spec", TargetSpec(model="gpt2"))
    assert not find(context)
