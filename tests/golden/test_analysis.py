"""Golden render of `memprof analyze`: a small training run that leaks, as text and as JSON.

`MEMPROF_BLESS=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

import json
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


def test_json():
    check("analysis.json", json.dumps(document(top=3).to_json(), indent=1) + "\n")


@pytest.mark.parametrize("by", ["frame", "module", "category", "size"])
@pytest.mark.parametrize("at", ["peak", "end", "oom", "12", "-1"])
def test_no_line_is_wider_than_the_terminal(by, at):
    found = document(by=by, at=at)
    for width in (80, 110, 160):
        assert max(map(len, to_text(render(found, replay=True), width).splitlines())) <= width


def test_json_names():
    found = document().to_json()
    assert set(found) >= {"schema", "memprof_version", "command", "source", "devices", "replay", "assumptions"}
    assert set(found["replay"]) == {
        "allocations", "identical_addresses", "final_layout_identical", "first_difference",
    }  # fmt: skip
    device = found["devices"][0]
    assert set(device) >= {"peak", "end", "timeline", "moment", "ooms", "leaks", "what_if", "missing_frames", "replay"}
    json.dumps(found)
