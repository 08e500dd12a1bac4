"""Rows that come again and again are shown once in text; the JSON has them all."""

from __future__ import annotations

import pytest

from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import to_text
from memprof.report.terminal.folding import MAX_GROUPS_OF_ROUNDS, fold_stages
from memprof.report.terminal.report import render
from memprof.report.terminal.stages import format_stage
from memprof.trace.events import ModuleRole, PhaseKind
from memprof.trace.facts import DeviceFacts, Facts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


def document(b: TraceBuilder) -> Report:
    b.trace.facts = Facts(command="run", device=DeviceFacts("GPU", 9999 * MIB, 9900 * MIB, 99 * MIB))
    return analyze(b.trace)


def call(b: TraceBuilder, size: int, *, keeps: bool = False) -> None:
    """A forward of two children, outside steps."""
    b.phase(PhaseKind.FORWARD, 0)
    b.enter("first", "Linear", ModuleRole.CHILD)
    made = b.new(size // 4)
    b.leave()
    b.enter("second", "ReLU", ModuleRole.CHILD)
    other = b.new(size // 4)
    b.leave()
    b.free(*[other] if keeps else [made, other])


def shown(b: TraceBuilder) -> list[tuple[str, int, int]]:
    return [(row.name, row.num_merged, row.num_rounds) for row in fold_stages(document(b)) if row.name != "parameters"][
        1:
    ]


def test_repeated_forwards_are_shown_once() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for _ in range(32):
        call(b, 8 * MIB)
    whole = document(b)
    assert len([row for row in whole.stages if row.name == "first Linear"]) == 32
    assert shown(b) == [("first Linear", 1, 32), ("second ReLU", 1, 32)]
    table, legend, _ = to_text(render(whole)).partition("N times: such rows came in turn")
    assert table.count("Linear") == 1 and "first (Linear), 32 times" in table and legend


def test_what_costs_more_stays_by_itself() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for size in (8, 8, 8, 40, 8, 8):
        call(b, size * MIB)
    assert [(turns, name) for name, _, turns in shown(b) if name == "first Linear"] == [
        (times, "first Linear") for times in (3, 1, 2)
    ]


def test_two_models_that_take_turns() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for _ in range(20):
        call(b, 8 * MIB)
        call(b, 40 * MIB)
    assert [turns for *_, turns in shown(b)] == [20] * 4


def test_rounds_that_all_differ_are_one_group_if_there_are_many() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    sizes = [8 * MIB * (1 + number * number) for number in range(MAX_GROUPS_OF_ROUNDS + 2)]
    for size in sizes:
        call(b, size)
    assert [turns for *_, turns in shown(b)] == [len(sizes)] * 2
    peaks = {row.name: row.peak_allocated_bytes for row in fold_stages(document(b))}
    assert peaks["second ReLU"] == document(b).peak.allocated_bytes


def test_what_piles_up_is_in_the_last_row() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for _ in range(10):
        call(b, 8 * MIB, keeps=True)
    last = fold_stages(document(b))[-1]
    assert last.num_rounds == 10 and last.allocated_bytes == (4 * 64 + 10 * 8) * MIB


def test_whole_steps_that_cost_the_same_are_one_row() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for step in range(1, 7):
        b.phase(PhaseKind.BACKWARD, step)
        b.free(b.new((64 if step in (1, 6) else 16) * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.free(b.new(4 * MIB))
    assert shown(b) == [
        ("all of step 1", 1, 1),
        ("steps 2-5", 4, 1),
        ("backward", 1, 1),
        ("optimizer step", 1, 1),
    ]


def passes(b: TraceBuilder, step: int, *sizes: int) -> None:
    """Forward, backward and what lies between them, of each size in MiB."""
    for number, size in enumerate(sizes, 1):
        b.phase(PhaseKind.FORWARD, step, number)
        held = b.new(size * MIB)
        b.phase(PhaseKind.BACKWARD, step, number)
        b.free(held)
        b.phase(PhaseKind.OTHER, step, 0)
        b.free(b.new(MIB))


def test_micro_batches_are_folded_with_what_lies_between_them() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    passes(b, 1, 32, 16, 16, 16)
    b.phase(PhaseKind.OPTIMIZER_STEP, 1, 0)
    b.free(b.new(4 * MIB))
    assert [name for name, *_ in shown(b)][-2:] == ["micro-batches 2-4", "optimizer step"]


def test_passes_between_optimizers_are_no_micro_batches() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    passes(b, 1, 16, 32)
    b.phase(PhaseKind.OPTIMIZER_STEP, 1, 0)
    b.free(b.new(4 * MIB))
    b.phase(PhaseKind.FORWARD, 1, 3)
    b.free(b.new(8 * MIB))
    names = [name for name, *_ in shown(b)]
    assert names[0] == "forward-backward pass 1"
    assert names[-2:] == ["optimizer step", "forward-backward pass 3"]


@pytest.mark.parametrize(
    ("rounds", "numbers"), [(3, ("1, 4, 7", "2, 5, 8", "3, 6, 9")), (4, ("1, 4 ... 10", "2, 5 ... 11", "3, 6 ... 12"))]
)
def test_steps_that_take_turns_are_named_by_their_numbers(rounds: int, numbers: tuple[str, ...]) -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for step in range(1, 3 * rounds + 1):
        b.phase(PhaseKind.FORWARD, step)
        b.free(b.new((8, 16, 32)[step % 3] * MIB))
    b.phase(PhaseKind.FORWARD, 3 * rounds + 1)
    b.free(b.new(100 * MIB))
    assert shown(b)[:3] == [(f"steps {text}", 1, rounds) for text in numbers]


def test_batches_within_epochs() -> None:
    """Those of an evaluation come again after steps: each is folded first, and what is around them next."""
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        b.free(b.new(MIB))
        if step % 2 == 0:
            for _ in range(6):
                call(b, 8 * MIB)
    assert shown(b) == [("steps 1-4", 2, 2), ("first Linear", 1, 12), ("second ReLU", 1, 12)]


def test_layers_that_take_turns_are_averaged() -> None:
    """Attention and a feed-forward network, each a layer of one stack."""
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    b.phase(PhaseKind.FORWARD, 1)
    b.enter("", "Model", ModuleRole.ROOT)
    for number in range(12):
        b.enter(f"layers.{number}", "Layer", ModuleRole.LAYER)
        b.new((8 if number % 2 else 2) * MIB)
        b.leave()
    b.leave()
    b.phase(PhaseKind.BACKWARD, 1)
    assert "layers 0-11, +20.00 on average" in to_text(render(document(b)))


def test_the_peak_is_marked_where_it_was_reached() -> None:
    """What follows begins with as much, and only releases."""
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for _ in range(2):
        b.phase(PhaseKind.FORWARD, 1)
        b.enter("", "Model", ModuleRole.ROOT)
        b.enter("head", "Linear", ModuleRole.HEAD)
        logits = b.new(100 * MIB)
        b.leave()
        b.leave()
        b.free(logits)
    text = to_text(render(document(b)))
    marked = [line.split(",")[0] for line in text.splitlines() if "<- peak" in line]
    assert "in logits of step 1" in text and marked == [" logits"]


def test_the_peak_is_marked_in_the_row_of_its_layers() -> None:
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    b.phase(PhaseKind.FORWARD, 1)
    b.enter("", "Model", ModuleRole.ROOT)
    kept = []
    for number in range(12):
        b.enter(f"layers.{number}", "Layer", ModuleRole.LAYER)
        kept.append(b.new(8 * MIB))
        b.leave()
    b.enter("norm", "LayerNorm", ModuleRole.NORM)
    b.free(kept[0])
    b.new(2 * MIB)
    b.leave()
    b.leave()
    marked = [line for line in to_text(render(document(b))).splitlines() if "<- peak" in line]
    assert len(marked) == 1 and marked[0].split()[:2] == ["layers", "0-11,"]


@pytest.mark.parametrize(("over", "text"), [(0, "fits"), (1, "does not fit")])
def test_a_stage_fits_up_to_the_last_byte(over: int, text: str) -> None:
    b = TraceBuilder()
    call(b, 20 * MIB)
    row = fold_stages(document(b))[-1]
    _, fit = format_stage(row, row.peak_allocated_bytes - over, Unit("MiB", MIB), is_peak=False)
    assert fit.plain == text


@pytest.mark.parametrize(("kept", "name"), [(0, "steps 1-2"), (5, "steps 1-2"), (6, "steps 1-2, +0.01 a step")])
def test_steps_say_by_how_much_memory_grows(kept: int, name: str) -> None:
    """From half a hundredth of the unit on: 5 KiB are 0.0049 MiB, 6 KiB are 0.0059."""
    b = TraceBuilder()
    b.parameter("weight", 64 * MIB)
    for step in (1, 2, 3):
        b.phase(PhaseKind.FORWARD, step)
        b.new(kept * 1024 // 4)
        b.free(b.new(MIB))
    row = next(row for row in fold_stages(document(b)) if row.is_step)
    assert format_stage(row, None, Unit("MiB", MIB), is_peak=False)[0].plain == name
