"""The figures of notebooks: their numbers are the ledger's."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.errors import UsageError
from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.page.page import build_run_data
from memprof.trace.events import ModuleRole, PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


@pytest.fixture
def document() -> Report:
    made = TraceBuilder(None)
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
