"""Which stages the first screen of a report shows, and how many; and what it says to do first."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Group, RenderableType
from rich.text import Text

from memprof.findings import Evidence, Finding, Severity, Suggestion
from memprof.flows.account import analyze
from memprof.report.terminal.brief import _Fitting, list_actions, render
from memprof.report.terminal.console import to_text
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(
    ("num_others", "num_stages"), [(0, 8), (32, 8), (33, 7), (34, 6), (35, 5), (38, 2), (39, 2), (60, 2)]
)
@pytest.mark.parametrize("width", [60, 200])
def test_they_are_as_many_as_forty_lines_leave_room_for(num_others: int, num_stages: int, width: int) -> None:
    def make_screen(num: int) -> RenderableType:
        return Group(*[Text("other")] * num_others, *[Text("stage")] * num)

    assert to_text(_Fitting(make_screen), width).count("stage") == num_stages


def test_lines_are_those_of_a_hundred_columns() -> None:
    line = Text("two lines of sixty columns, and one of a hundred: " + "stage" * 4)
    assert to_text(_Fitting(lambda num: Group(*[line] * (num + 32))), 60).count("sixty") == 40


def test_stages_of_one_name_are_one_row() -> None:
    """Three backwards that differ, of which the second has the peak."""
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 999 * MIB, usable_bytes=999 * MIB))
    b.parameter("weight", MIB)
    for size in (2 * MIB, 8 * MIB, 4 * MIB):
        b.phase(PhaseKind.BACKWARD)
        b.free(b.new(size))
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.free(b.new(size // 4))
    table = to_text(render(analyze(b.trace)), 100).partition("  after\n")[2].splitlines()
    assert [line.split() for line in table[:3]] == [
        ["setup", "4.00", "4.00"], ["backward,", "3", "times", "<-", "peak", "36.00", "4.00"],
        ["optimizer", "step,", "3", "times", "12.00", "4.00"],
    ]  # fmt: skip


@pytest.mark.parametrize(("ended", "is_shown"), [("refused", False), ("steps", True)])
def test_where_memory_ended_a_script_there_is_no_table_of_stages(ended: str, is_shown: bool) -> None:
    b = TraceBuilder()
    program = ProgramFacts(("a.py",), ended, None, 1, ())
    b.trace.facts = Facts(device=DeviceFacts("A", 50 * MIB, usable_bytes=50 * MIB), program=program)
    b.alloc(20 * MIB)
    b.phase(PhaseKind.BACKWARD)
    b.alloc(40 * MIB)
    screen = to_text(render(analyze(b.trace)))
    assert ("backward  <- peak  <- out of memory" in screen) is is_shown and ("  after\n" in screen) is is_shown


@pytest.mark.parametrize(
    ("stage", "place"),
    [("backward", "in the backward of a.py:2, called at a.py:3"), ("loss", "at a.py:2, called at a.py:3")],
)
def test_the_failed_allocation_has_a_row_and_in_a_backward_the_line_of_the_forward(stage: str, place: str) -> None:
    b = TraceBuilder()
    program = ProgramFacts(("a.py",), "refused", None, 1, ())
    b.trace.facts = Facts(device=DeviceFacts("A", 50 * MIB, usable_bytes=50 * MIB), program=program)
    b.parameter("weight", 5, MIB)
    b.phase(PhaseKind.BACKWARD)
    b.new(4, MIB)
    b.new(8, MIB, line="a.py:2 f")
    b.trace.ended_out_of_memory = True
    report = analyze(b.trace)
    verdict = dataclasses.replace(report.verdict, oom_callers=("a.py:3 main",), oom_stage=stage)
    peak = dataclasses.replace(report.peak, stage=stage)
    screen = to_text(render(dataclasses.replace(report, verdict=verdict, peak=peak)), 100)
    assert f"failed allocation: 32.00 MiB, [8x1048576] float32 by mm, {place}" in screen.replace("\n  ", " ")
    rows = [
        [word.strip() for word in line.split("  ") if word.strip()][:2] for line in screen.splitlines() if "%" in line
    ]
    rest = "temporaries of the backward" if stage == "backward" else "temporaries"
    assert rows == [["failed allocation", "32.00"], ["parameters", "20.00"], [rest, "16.00"]]


@pytest.mark.parametrize(
    ("op", "count", "told"),
    [
        ("aten.sub", 1, "largest of the others: [8x1048576] float32"),  # of the same line, by another operator
        ("aten.mm", 1, "largest of the others: [8x1048576] float32"),
        ("aten.mm", 2, "largest of the others: 2 x [8x1048576] float32"),
        ("aten.mm", 0, "largest of the others: [5x1048576] float32"),
    ],
)
def test_what_is_beside_the_failed_allocation_may_be_as_it_is(op: str, count: int, told: str) -> None:
    b = TraceBuilder()
    program = ProgramFacts(("a.py",), "refused", None, 1, ())
    b.trace.facts = Facts(device=DeviceFacts("A", 50 * MIB, usable_bytes=50 * MIB), program=program)
    b.new(5, MIB, line="a.py:1 f")
    b.phase(PhaseKind.FORWARD)
    for _ in range(count):
        b.new(8, MIB, op=op, line="a.py:2 f")
    b.new(8, MIB, line="a.py:2 f")
    b.trace.ended_out_of_memory = True
    assert told in to_text(render(analyze(b.trace)), 100)


def test_one_stage_alone_is_no_table() -> None:
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 999 * MIB, usable_bytes=999 * MIB))
    b.parameter("weight", MIB)
    assert "  after\n" not in to_text(render(analyze(b.trace)))


def suggest(name: str, saved_mib: int, *, fix: str | None = None) -> Suggestion:
    return Suggestion(name, fix, 0, True, saved_mib * MIB)


@pytest.mark.parametrize(
    ("suggestions", "order"),
    [
        ([suggest("exact", 20), suggest("generic", 80)], ["exact", "generic"]),
        ([suggest("exact", 9), suggest("generic", 80)], ["generic", "exact"]),  # a tenth of the need
        ([suggest("exact", 10), suggest("generic", 80)], ["exact", "generic"]),
        ([suggest("expandable", 50, fix="expandable-segments"), suggest("other", 20)], ["other", "expandable"]),
    ],
)
def test_suggestions_come_by_their_cost_unless_they_save_little(
    suggestions: list[Suggestion], order: list[str]
) -> None:
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", 80 * MIB, usable_bytes=80 * MIB))
    b.alloc(100 * MIB)
    document = analyze(b.trace)
    assert document.verdict.required_bytes == 100 * MIB
    cut = Finding("other", Severity.WARNING, "", 0, (), (), suggestions=tuple(reversed(suggestions)))
    whole = Finding("does-not-fit", Severity.ERROR, "", 0, (), (), suggestions=tuple(suggestions))
    actions = list_actions(dataclasses.replace(document, findings=[cut, whole]), None)
    assert [action.text for action in actions][: len(order)] == order


ROOM, OTHER = suggest("room", 50, fix="expandable-segments"), suggest("other", 20)
FULL, TIGHT = (dataclasses.replace(OTHER, text="room", required_bytes=num_mib * MIB) for num_mib in (81, 80))  # of 80


@pytest.mark.parametrize(
    ("ended", "suggestions", "is_in_pieces", "order"),
    [
        ("refused", [ROOM, OTHER], False, ["other"]),  # the next allocations fail instead
        ("exit", [ROOM, OTHER], False, ["other", "room"]),
        ("refused", [ROOM], False, ["room"]),
        ("refused", [FULL, OTHER], False, ["other"]),
        ("refused", [TIGHT, OTHER], False, ["room", "other"]),
        ("refused", [FULL], False, ["room"]),
        ("exit", [FULL, OTHER], False, ["room", "other"]),
        ("refused", [ROOM, OTHER], True, ["room", "other"]),
    ],
)
def test_room_that_is_just_made_is_no_way_out_where_memory_ended_the_run(
    ended: str, suggestions: list[Suggestion], is_in_pieces: bool, order: list[str]
) -> None:
    b = TraceBuilder()
    program = ProgramFacts(("a.py",), ended, None, 1, ())
    b.trace.facts = Facts(device=DeviceFacts("A", 80 * MIB, usable_bytes=80 * MIB), program=program)
    b.alloc(100 * MIB)
    cause = Finding("fragmentation" if is_in_pieces else "idle-memory", Severity.WARNING, "", 0, (), ())
    whole = Finding("does-not-fit", Severity.ERROR, "", 0, (), (), suggestions=tuple(suggestions))
    findings = [dataclasses.replace(cause, is_decisive=is_in_pieces), whole]
    actions = list_actions(dataclasses.replace(analyze(b.trace), findings=findings), None)
    assert [action.text for action in actions if action.text in ("room", "other")] == order


LINE_FIX = Evidence("fix: `del out` after the last use", source="/x/train.py:9 main")


@pytest.mark.parametrize("usable_mib", [200, 80])
@pytest.mark.parametrize(
    ("severity", "fix", "hides"),
    [
        (Severity.WARNING, LINE_FIX, ["stages", "largest"]),
        (Severity.NOTE, LINE_FIX, ["stages", "largest"]),
        (Severity.WARNING, Evidence("fix: lower the batch size"), ["largest"]),
        (Severity.NOTE, Evidence("fix: lower the batch size"), ["largest"]),
        (Severity.NOTE, Evidence("nothing to do"), []),
    ],
)
def test_where_a_line_is_to_be_changed_no_tables_follow(
    severity: Severity, fix: Evidence, hides: list[str], usable_mib: int
) -> None:
    """Of a run that does not fit, notes are not shown, and the largest tensor stands with the causes."""
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", usable_mib * MIB, usable_bytes=usable_mib * MIB))
    b.alloc(20 * MIB)
    b.phase(PhaseKind.BACKWARD)
    b.alloc(100 * MIB)
    finding = Finding("idle-memory", severity, "", 50 * MIB, (fix,), ())
    screen = to_text(render(dataclasses.replace(analyze(b.trace), findings=[finding])), 100)
    fits = usable_mib == 200
    is_told = fits or severity is Severity.WARNING
    assert ("  after\n" in screen) is not (is_told and "stages" in hides)
    assert ("Largest at the peak" in screen) is (fits and "largest" not in hides)


@pytest.mark.parametrize(
    ("usable_mib", "severity", "is_decisive", "order"),
    [
        (80, Severity.WARNING, False, ["change", "fix"]),
        (80, Severity.WARNING, True, ["fix", "change"]),
        (80, Severity.ERROR, False, ["fix", "change"]),
        (200, Severity.WARNING, False, ["fix", "change"]),
    ],
)
def test_a_fix_comes_before_what_else_helps_if_it_is_of_a_cause(
    usable_mib: int, severity: Severity, is_decisive: bool, order: list[str]
) -> None:
    """Beside another cause, which has no line to be changed."""
    b = TraceBuilder()
    b.trace.facts = Facts(device=DeviceFacts("A", usable_mib * MIB, usable_bytes=usable_mib * MIB))
    b.alloc(100 * MIB)
    cause = Finding("fragmentation", Severity.WARNING, "pieces", 50 * MIB, (), (), is_decisive=is_decisive)
    fixed = Finding("run-failed", severity, "noticed", 50 * MIB, (Evidence("fix: fix"),), (), is_decisive=is_decisive)
    whole = Finding("does-not-fit", Severity.ERROR, "", 0, (), (), suggestions=(suggest("change", 20),))
    actions = list_actions(dataclasses.replace(analyze(b.trace), findings=[cause, fixed, whole]), None)
    assert [action.text for action in actions if action.text in ("fix", "change")] == order
