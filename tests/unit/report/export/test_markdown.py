"""A report as Markdown, and its findings as annotations: what stands in them is the report's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from memprof.findings import Evidence, Finding, Severity
from memprof.flows.account import analyze
from memprof.report.documents.report import Report
from memprof.report.export.markdown import list_annotations, to_markdown
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def report(*findings: Finding) -> Report:
    """A step that leaves 30 MiB, on a GPU with 100 MiB."""
    made = TraceBuilder(None)
    made.trace.facts = Facts(device=DeviceFacts("Some GPU", 100 * MIB, usable_bytes=100 * MIB))
    made.phase(PhaseKind.FORWARD, step=1)
    for _ in range(3):
        made.alloc(10 * MIB, "aten.mm", line="net.py:3 <lambda>")
    return dataclasses.replace(analyze(made.trace), findings=findings)


def finding(title: str, *evidence: Evidence, severity: Severity = Severity.WARNING, decides: bool = False) -> Finding:
    return Finding("memory-growth", severity, title, 1, evidence, (), is_decisive=decides)


def test_the_verdict_is_the_title_and_the_report_is_folded() -> None:
    text = to_markdown(report())
    need = "needs 30.00 MiB (30.00 of tensors, 0.00 of CUDA context), 70.00 MiB to spare."
    assert text.startswith(f"### memprof: Fits\n\n{need}\n")
    assert "| 30.00 | 100.0% |" in text
    assert text.count("```") == 2 and text.index("<details>") < text.index("```text")


def test_what_markdown_would_read_is_shown_as_it_is() -> None:
    text = to_markdown(report(finding("list `kept` of [2x3] <b> *.weight ```"))).partition("<details>")[0]
    assert r"list \`kept\` of \[2x3\] \<b\> \*.weight" in text


def test_a_report_with_a_fence_does_not_end_its_own() -> None:
    screen = to_markdown(report(finding("a ``` b"))).partition("</summary>\n\n")[2]
    assert screen.startswith("````text\n") and screen.count("````") == 2


@pytest.mark.parametrize(
    ("severity", "decides", "level"),
    [(Severity.WARNING, False, "warning"), (Severity.ERROR, False, "error"), (Severity.WARNING, True, "error")],
)
def test_a_finding_stands_beside_the_line_to_change(severity: Severity, decides: bool, level: str) -> None:
    evidence = Evidence("grows", source="/code/lib.py:9 f"), Evidence("fix: del", source="/code/a,b.py:7 main")
    found = report(finding("50% more\nof it", *evidence, severity=severity, decides=decides))
    assert list(list_annotations(found, Path("/code"))) == [
        f"::{level} file=a%2Cb.py,line=7,title=memprof memory-growth::50%25 more%0Aof it"
    ]


def test_notes_and_findings_without_a_line_have_no_annotation() -> None:
    evidence = Evidence("fix: del", source="/code/a.py:7 main")
    found = report(finding("no line"), finding("note", evidence, severity=Severity.NOTE))
    assert not list(list_annotations(found, Path("/code")))
