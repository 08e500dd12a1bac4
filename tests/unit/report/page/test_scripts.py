"""The names by which the page's scripts take its data are those that it is given; tests/cli has it in a browser."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from memprof.findings import Finding, Severity
from memprof.flows.account import analyze
from memprof.report.documents.ladder import LadderRow
from memprof.report.documents.report import GpuRow, RankRow
from memprof.report.page import page
from memprof.report.page.page import build_run_data
from memprof.trace.events import PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

FOLDER = Path(page.__file__).parent


def used(variable: str, *files: str) -> set[str]:
    """Return the names after `variable.` in scripts, but for methods of arrays."""
    text = "".join((FOLDER / file).read_text(encoding="utf-8") for file in files)
    return set(re.findall(rf"(?<![\w.]){variable}\.([a-z_]+)\b(?!\()", text))


def data() -> dict[str, Any]:
    made = TraceBuilder(None)
    made.phase(PhaseKind.FORWARD, step=1)
    made.alloc(5 * MIB, "aten.mm")
    report = analyze(made.trace)
    found = Finding("id", Severity.NOTE, "Title", None, (), ("batch-size=1",))
    return build_run_data(dataclasses.replace(report, findings=(found,)))


def test_every_name_is_there() -> None:
    scripts = [file for file in page._RUN_FILES if file.endswith(".js")]
    given = data()
    assert used("data", *scripts) <= set(given)
    assert used("moments", *scripts) - {"py"} <= set(given["moments"])
    assert used("kinds", "moments.js") <= set(given["moments"]["kinds"])
    assert used("capacity", *scripts) <= set(given["capacity"])
    assert used("finding", *scripts) <= set(given["findings"][0])
    assert {"name", "changes"} == set(given["findings"][0]["fixes"][0])
    assert used("rung", *scripts) - {"cost"} <= {field.name for field in dataclasses.fields(LadderRow)}
    rows = {field.name for kind in (GpuRow, RankRow) for field in dataclasses.fields(kind)}
    assert used("row", "segments.js") <= rows
