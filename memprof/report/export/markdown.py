"""A report as Markdown, for a comment on a pull request or the summary of a job, and as annotations of GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group

from memprof.findings import Finding, Severity
from memprof.findings.does_not_fit import DOES_NOT_FIT
from memprof.report.documents.report import Report
from memprof.report.terminal import brief, layout
from memprof.report.terminal.cells import choose_unit
from memprof.report.terminal.console import to_text
from memprof.report.terminal.verdict import render_certain_errors, render_verdict
from memprof.trace.files import FileKind

MARKDOWN = FileKind("summary", "--markdown", lambda begin, end: begin.startswith(_TITLE.encode()))
_TITLE = "### memprof: "
_WIDTH = 100  # columns of the report below the fold
_ANNOTATION_BY_SEVERITY = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def to_markdown(document: Report, code_folder: Path | None = None) -> str:
    """Return the first screen of a report as Markdown: verdict, causes, what to do, categories; and folded, as text.

    `code_folder`: the folder in which the program was run, whose lines are quoted; None: its files may have changed.
    """
    answer = Group(*render_certain_errors(document), render_verdict(document, is_short=True))
    verdict, _, rest = " ".join(to_text(answer, width=layout.MAX_WIDTH).split()).partition(": ")
    parts = [f"{_TITLE}{verdict}", _escape(rest)]
    parts += [_make_list("Why", (_escape(brief.describe_cause(one)) for one in brief.list_causes(document)))]
    parts += [_make_list("Do", map(_format_action, brief.list_actions(document, code_folder))), _make_table(document)]
    screen = to_text(brief.render(document, code_folder=code_folder), _WIDTH).strip("\n")
    parts += [f"<details><summary>The report</summary>\n\n{_fence(screen)}\n\n</details>"]
    return "\n\n".join(part for part in parts if part) + "\n"


def list_annotations(document: Report, code_folder: Path) -> Iterator[str]:
    """Yield a command of GitHub Actions for each finding with a line of the program: it then stands beside that line
    of the pull request (docs.github.com, workflow commands)."""
    causes = brief.list_causes(document)
    if not any(finding.is_decisive for finding in causes):
        causes = [*(one for one in document.findings if one.id == DOES_NOT_FIT), *causes]
    for finding in causes:
        source = _find_source(finding)
        if source is None:
            continue
        place, _, number = source.rpartition(" ")[0].rpartition(":")
        path = Path(place)
        name = path.relative_to(code_folder) if path.is_relative_to(code_folder) else path
        level = "error" if finding.is_decisive else _ANNOTATION_BY_SEVERITY[finding.severity]
        properties = f"file={_escape_property(str(name))},line={number},title=memprof {finding.id}"
        yield f"::{level} {properties}::{_escape_data(finding.title)}"


def _find_source(finding: Finding) -> str | None:
    """Return the program's line that a finding is about, `file:line function`: that of its fix, or its first one."""
    fixes = (evidence.source for evidence in finding.evidence if evidence.text.startswith("fix"))
    sources = (evidence.source for evidence in finding.evidence)
    return next((source for source in (*fixes, *sources) if source), None)


def _make_table(document: Report) -> str:
    """Return a table of the categories at the peak."""
    total_bytes = document.peak.allocated_bytes
    if not total_bytes:
        return ""
    unit = choose_unit(total_bytes)
    rows = [
        f"| {category} | {unit.format(num_bytes)} | {num_bytes / total_bytes:.1%} |"
        for category, num_bytes in document.peak.categories.items()
        if num_bytes >= brief.MIN_SHARE * total_bytes
    ]
    return "\n".join([f"| at the peak | {unit.name} | share |", "|---|---:|---:|", *rows])


def _make_list(title: str, lines: Iterator[str]) -> str:
    items = [f"* {line}" for line in lines]
    return "\n".join([f"**{title}**", "", *items]) if items else ""


def _format_action(action: brief.Action) -> str:
    """Return an action as an item of a list, its code or command in a block below."""
    return _escape(action.text) + (f":\n\n{_indent(_fence(action.code))}" if action.code else "")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _fence(text: str) -> str:
    """Return `text` as a block of code, which no line of it ends."""
    marks = "```"
    while marks in text:
        marks += "`"
    return f"{marks}text\n{text}\n{marks}"


def _escape(text: str) -> str:
    """Return `text` so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
