"""The figures of notebooks: their numbers are the ledger's."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.errors import UsageError
from memprof.flows.account import analyze
from memprof.report.documents.ladder import Bottleneck, FixCost, LadderRow
from memprof.report.documents.report import Report
from memprof.report.page.page import build_run_data
from memprof.trace.events import ModuleRole, PhaseKind
from memprof.trace.facts import DeviceFacts, Facts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


@pytest.fixture
def document() -> Report:
    return run(None)


def run(usable_bytes: int | None) -> Report:
    made = TraceBuilder(None)
    if usable_bytes is not None:
        made.trace.facts = Facts(device=DeviceFacts("A", usable_bytes, usable_bytes=usable_bytes))
    made.phase(PhaseKind.FORWARD, step=1)
    for layer in range(3):
        made.enter(f"layers.{layer}", role=ModuleRole.LAYER)
        made.alloc(5 * MIB, "aten.mm", line="net.py:3 <lambda>")
        made.leave()
    made.alloc(MIB + 1, "aten.mul")
    return analyze(made.trace)


def test_the_timeline_ends_at_the_peak(document):
    draw_figure = document.plot()
    *areas, total = draw_figure.data
    assert max(total.y) * MIB == document.peak.allocated_bytes
    assert sum(max(area.y) for area in areas) * MIB == document.peak.allocated_bytes
    assert "16.00 MiB" in draw_figure.layout.annotations[0].text


def test_the_treemaps_nodes_sum_to_the_peak(document):
    (tree,) = document.plot("treemap").data
    assert sum(value for value, parent in zip(tree.values, tree.parents, strict=True) if not parent) == (
        document.peak.allocated_bytes
    )
    by_id = dict(zip(tree.ids, tree.values, strict=True))
    assert by_id["layers"] == 15 * MIB and by_id["layers\0" + "1"] == 5 * MIB


@pytest.mark.parametrize(
    ("usable_mib", "is_refused", "is_near"),
    [(None, False, False), (19, True, True), (20, False, True), (49, False, False)],
)
def test_the_timeline_marks_what_the_gpu_refuses_and_where_it_ends(usable_mib, is_refused, is_near) -> None:
    """The first tensor, at event 2, needs a segment of 20 MiB, in which all others have room: 16 MiB at the peak."""
    document = run(None if usable_mib is None else usable_mib * MIB)
    drawn, moments = document.plot(), build_run_data(document)["moments"]
    lines = [(shape.x0, shape.y0, shape.line.dash) for shape in drawn.layout.shapes]
    refused, end = [(2, 0, "dot")] * is_refused, [(0, usable_mib, "dash")] * is_near
    assert lines == [(moments["peak"], 0, "dot"), *refused, *end]
    assert [one.text for one in drawn.layout.annotations[1:]] == ["refused: 20.00 MiB"] * is_refused
    assert (moments["refused"], moments["tried_bytes"]) == ((2, 20 * MIB) if is_refused else (-1, 0))


def test_the_ladder_has_a_bar_for_each_row(document: Report) -> None:
    cost = FixCost(*(None,) * 9, "exact", "a <note>")
    ladder = tuple(
        LadderRow(
            (), None if i == 0 else f"fix{i}", 0, 0, (3 - i) * MIB, 0, 0, i == 2, Bottleneck("", 0, "", 0, ""), cost
        )
        for i in range(3)
    )
    document = dataclasses.replace(document, ladder=ladder, device=DeviceFacts("A", 2 * MIB))
    drawn = document.plot("ladder")
    (bars,) = drawn.data
    assert list(bars.y) == ["0. baseline", "1. + fix1", "2. + fix2"] and list(bars.x) == [3, 2, 1]
    assert list(bars.text) == ["3.00 MiB", "2.00 MiB", "1.00 MiB"] and set(bars.hovertext) == {"a &lt;note&gt;"}
    assert [colour == bars.marker.color[0] for colour in bars.marker.color] == [True, True, False]
    assert [shape.x0 for shape in drawn.layout.shapes] == [2]


def test_a_figure_that_is_not_there_is_said(document):
    with pytest.raises(UsageError, match="timeline"):
        document.plot("timelin")
    with pytest.raises(UsageError, match="no ladder"):
        document.plot("ladder")
    of_json = Report.from_json(document.to_json())
    assert of_json.ledger is None
    for asks in (of_json.plot, lambda: build_run_data(of_json)):
        with pytest.raises(UsageError, match="no moments"):
            asks()


def test_a_report_shows_itself_in_a_notebook_with_foreign_words_as_text(document):
    shown = document._repr_html_()
    assert "At the peak" in shown and "#000000" not in shown
    hostile = dataclasses.replace(document, device=dataclasses.replace(document.device, name="<img src=x>"))
    assert "<img" not in hostile._repr_html_() and "&lt;img" in hostile._repr_html_()
