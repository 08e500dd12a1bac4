"""Golden render of `memprof analyze`: a small training run that leaks.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

from pathlib import Path

import pytest

from memprof.allocator import parse_config
from memprof.report.documents.analysis import Analysis
from memprof.report.documents.analysis_build import AnalysisRequest, RecordingOrigin, build_analysis
from memprof.report.terminal import analysis_brief
from memprof.report.terminal.analysis import render
from memprof.report.terminal.console import to_text
from memprof.snapshots.recording import build_recordings
from memprof.snapshots.steps import find_steps
from tests.golden.test_report import check
from tests.unit.snapshots.builder import training


def document(**question) -> Analysis:
    program = training(steps=6, leak=True)
    program.malloc(8 << 30)
    found = build_recordings(program.snapshot())
    for one in found:
        one.steps = find_steps(one)
    origin = RecordingOrigin("training.pickle", "torch snapshot", "measured", "", ("A hand-written run.",))
    return build_analysis(found, origin, AnalysisRequest(**question))


def test_text():
    text = to_text(render(document(what_if=parse_config("expandable_segments:True")), replay=True), 100)
    check("analysis.txt", text)


def test_first_screen():
    text = to_text(analysis_brief.render(document(), file=Path("training.pickle")), 100)
    assert len(text.splitlines()) <= 40
    check("analysis_brief.txt", text)


@pytest.mark.parametrize("by", ["frame", "module", "category", "size"])
@pytest.mark.parametrize("at", ["peak", "end", "oom", "12", "-1"])
def test_no_line_is_wider_than_the_terminal(by, at):
    found = document(by=by, at=at)
    for width in (80, 110, 160):
        assert max(map(len, to_text(render(found, replay=True), width).splitlines())) <= width
