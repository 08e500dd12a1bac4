"""Documents print themselves, and come back from the files they were saved to."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys

import pytest

import memprof
from memprof.flows.account import analyze
from memprof.flows.compare import compare_files
from memprof.report.documents.report import Report
from memprof.report.matching.tolerance import Tolerance
from memprof.trace.io import save_trace
from tests.golden import test_analysis, test_comparison, test_report
from tests.unit.trace.test_io import sample


@pytest.fixture
def report() -> Report:
    return analyze(sample())


class ZMQInteractiveShell:
    """As rich looks for a notebook: by the shell's name."""


@pytest.mark.parametrize("where", ["notebook", "forced colour", "plain"])
def test_a_document_is_its_text(monkeypatch, capsys, report, where):
    plain = str(report)
    if where == "notebook":
        monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    if where == "forced colour":
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(report) == plain
    assert plain.startswith("memprof ") and "\x1b" not in plain
    assert capsys.readouterr().out == ""
    assert repr(report) == f"<Report: {plain.splitlines()[0]}>"


@pytest.mark.parametrize(
    "make", [lambda: test_report.document(2 << 30), test_analysis.document, test_comparison.document]
)
def test_documents_come_back(tmp_path, make):
    make().save(tmp_path / "document.json")
    document = memprof.load(tmp_path / "document.json")
    document.save(tmp_path / "document.json")
    again = memprof.load(str(tmp_path / "document.json"))
    assert (type(again), again) == (type(make()), document)
    document.save(tmp_path / "document.json")  # it is ours to replace
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(memprof.UsageError, match="not a"):
        memprof.load(tmp_path / "notes.json")
    with pytest.raises(memprof.UsageError):
        document.save(tmp_path / "notes.json")


def test_a_capture_is_accounted_for(tmp_path, report):
    save_trace(sample(), tmp_path / "run.memprof")
    assert str(memprof.load(tmp_path / "run.memprof")) == str(report)
    report.save(tmp_path / "run.json")
    with pytest.raises(memprof.UsageError, match="only a capture"):
        memprof.load(tmp_path / "run.json", alloc_conf="expandable_segments:True")
    comparison = compare_files(tmp_path / "run.memprof", tmp_path / "run.json", Tolerance())
    comparison.save(tmp_path / "both.json")
    with pytest.raises(memprof.UsageError, match="a comparison already"):
        compare_files(tmp_path / "both.json", tmp_path / "run.json", Tolerance())


@pytest.mark.parametrize("schema", [99, None, "2"])
def test_of_a_newer_release(tmp_path, report, schema):
    (tmp_path / "run.json").write_text(json.dumps({**report.to_json(), "schema": schema}))
    with pytest.raises(memprof.UsageError, match="newer memprof"):
        memprof.load(tmp_path / "run.json")


def test_loading_needs_no_torch(tmp_path, report):
    report.save(tmp_path / "run.json")
    code = "import sys, memprof; print(memprof.load(sys.argv[1])); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, tmp_path / "run.json"], check=True, capture_output=True)
