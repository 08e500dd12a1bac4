"""Which errors are the program's, and which are gaps of the virtual GPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.findings import Severity
from memprof.flows.script import run_script
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program, StopRule
from memprof.trace.events import FailureKind, Phase, PhaseKind
from memprof.watch import failure


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


def test_an_error_of_an_installed_library_has_the_line_that_called_it(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "broken_library.py"
    library.parent.mkdir()
    library.write_text("def fail():\n    raise OSError\n", encoding="utf-8")
    document = report(
        tmp_path, f"import sys; sys.path.append({str(library.parent)!r})\nimport broken_library\nbroken_library.fail()"
    )
    (finding,) = (one for one in document.findings if one.id == "run-failed")
    assert "site-packages/broken_library.py:2, called at train.py:5: OSError" in finding.title.replace(
        f"{tmp_path.name}/", ""
    )


def raise_in(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fails() -> None:
    raise ValueError("no")


def calls() -> None:
    fails()


def test_a_measured_failure_is_at_the_innermost_line_of_the_program() -> None:
    found = failure.describe_measured_failure(raise_in(calls), Phase(PhaseKind.FORWARD, 1, 1))
    assert found.source == f"{__file__}:{fails.__code__.co_firstlineno + 1} fails"


def test_frames_of_libraries_are_cleared_and_those_of_the_program_stay() -> None:
    """The library's would keep what they have as long as the error; a debugger wants the program's."""
    namespace: dict[str, Any] = {}
    exec(compile("def run(inner):\n  held = inner\n  inner()\n", torch.__file__, "exec"), namespace)

    def program() -> None:
        mine = 1
        namespace["run"](fails)
        assert mine

    error = raise_in(program)
    failure.clear_frames(error)
    variables = {frame.f_code.co_name: set(frame.f_locals) for frame, _ in traceback.walk_tb(error.__traceback__)}
    assert "mine" in variables["program"] and not variables["run"]


@pytest.mark.parametrize(
    ("text", "may_depend"),
    [
        ("for name in []: pass\nname", True),  # set in a loop that was not entered
        ("nmae = 1\nname", False),
        ("import no_such_module", False),
        ("None.shape", True),
        ("(1).shape", False),
        ("{}['name']", False),
        ("{}[3]", True),
        ("def f():\n  if 0: x = 1\n  x\nf()", True),
        ("[][2]", True),
        ("dict.fromkeys()", True),  # "expected at least 1 argument": of C, which says it in many ways
        ("(lambda x: x)(y=1)", False),
        ("(lambda x: x)()", False),
        ("(lambda *, x: x)()", False),
        ("(lambda x: x)(1, 2)", False),
        ("(lambda x: x)(1, x=2)", False),
        ("1 + None", True),
    ],
)
def test_errors_that_other_values_would_not_have_raised(text: str, may_depend: bool) -> None:
    error = raise_in(lambda: exec(compile(text, "train.py", "exec"), {}))
    assert failure._depends_on_values(error) == may_depend
