"""The table of steps: folded in text, whole in JSON, and not of runs that name their own phases."""

from __future__ import annotations

import io

from rich.console import Console

from memprof.flows.account import analyze
from memprof.ledger.steps import TrainingStep
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.steps import MAX_ROWS, render_steps
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


def lines(*rows: TrainingStep) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    console.print(render_steps(rows, Unit("MiB", MIB)))
    text = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    begin = next(number for number, line in enumerate(text) if "─" in line) + 1
    return [line.split() for line in text[begin:] if line.strip() and "optimizer's step" not in line][:-1]


def row(step: int, peak: int, end: int, growth: int) -> TrainingStep:
    return TrainingStep(step, peak * MIB, end * MIB, growth * MIB)


def report(command: str, steps: int) -> dict:
    b = TraceBuilder()
    b.parameter("weight", MIB)
    for step in range(1, steps + 1):
        b.phase(PhaseKind.FORWARD, step)
        b.new(MIB // 4)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    b.trace.facts = Facts(command=command, device=DeviceFacts("GPU", 999 * MIB, 900 * MIB, 99 * MIB))
    return analyze(b.trace).to_json()


def test_equal_steps_are_one_row() -> None:
    rows = [row(1, 20, 10, 10), *(row(step, 30, 10, 0) for step in range(2, 9)), row(9, 31, 11, 1)]
    assert lines(*rows)[:2] == [["1", "20.00", "10.00", "+10.00"], ["2-8", "30.00", "10.00", "+0.00"]]


def test_steady_growth_is_one_row() -> None:
    rows = [row(1, 20, 10, 10), *(row(step, 20 + 3 * step, 10 + 3 * step, 3) for step in range(2, 9))]
    assert lines(*rows, row(9, 99, 1, -33))[1] == ["2-8", "44.00", "34.00", "+3.00", "each"]


def test_many_different_steps_are_cut_short() -> None:
    shown = lines(*(row(step, 100 + step, 10 + step * step, step) for step in range(1, 101)))
    assert [cells[0] for cells in shown[:7]] == ["1", "2", "3", "4", "5", "6", "..."]
    assert shown[6][1] == str(100 - MAX_ROWS)


def test_json_has_every_step() -> None:
    assert list(report("virtual_gpu", 3)["steps"]) == [
        {"step": 1, "peak_bytes": 5 * MIB, "end_bytes": 5 * MIB, "growth_bytes": MIB},
        {"step": 2, "peak_bytes": 6 * MIB, "end_bytes": 6 * MIB, "growth_bytes": MIB},
        {"step": 3, "peak_bytes": 7 * MIB, "end_bytes": 7 * MIB, "growth_bytes": MIB},
    ]


def test_not_of_one_step_nor_of_a_profile() -> None:
    assert report("virtual_gpu", 1)["steps"] == [] and report("profile", 3)["steps"] == []
