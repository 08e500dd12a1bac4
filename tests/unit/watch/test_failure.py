"""Which errors are the program's, and which are gaps of the virtual GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.findings import Severity
from memprof.flows.script import run_script
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program, StopRule
from memprof.trace.events import FailureKind


def report(folder: Path, line: str) -> Report:
    script = folder / "train.py"
    script.write_text(f"import torch\nx = torch.ones(4, device='cuda')\n{line}\n", encoding="utf-8")
    document = run_script(Program(str(script)), StopRule(), RunSpec()).document
    assert document is not None
    return document


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("raise RuntimeError('expected CPUFloatType but got Meta' + 'FloatType')", FailureKind.GAP),
        ("raise RuntimeError('the Metadata of x')", FailureKind.ERROR),
        ("torch.empty(2, device='meta'); raise RuntimeError('no data on Meta')", FailureKind.ERROR),
        ("x @ torch.ones(5, device='cuda')", FailureKind.ERROR),
        ("{}['name']", FailureKind.ERROR),
        ("assert False", FailureKind.ERROR),
    ],
)
def test_an_error_that_speaks_of_tensors_without_data_is_a_gap(tmp_path: Path, line: str, kind: FailureKind) -> None:
    document = report(tmp_path, line)
    assert document.failure is not None and document.failure.kind == kind
    (finding,) = (one for one in document.findings if one.id == "run-failed")
    assert finding.severity is Severity.ERROR
    assert ("a gap of the virtual GPU, not an error of the program" in finding.title) is (kind is FailureKind.GAP)
