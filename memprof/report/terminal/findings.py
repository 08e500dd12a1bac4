"""The findings of a report as text for a terminal, with evidence and suggested fixes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.findings import Evidence, Finding, Severity
from memprof.fixes.catalog import FIXES
from memprof.report.documents.report import Report
from memprof.report.terminal.console import dim, indent, make_heading
from memprof.trace.events import short_source

MAX_EVIDENCE = 6
SEVERITY_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def render_findings(document: Report) -> RenderableType:
    """Return the findings, each with its evidence and suggested fixes."""
    if not document.findings:
        return Text("No findings.\n")
    views = (indent(_render_finding(number, finding), below=1) for number, finding in enumerate(document.findings, 1))
    return Group(make_heading("Findings, most important first"), *views)


def _render_finding(number: int, finding: Finding) -> RenderableType:
    title = Text(f"{number}. ").append(f"{finding.severity.value}: ", style=SEVERITY_STYLE[finding.severity])
    lines = [title.append(finding.title), *(_render_evidence(evidence) for evidence in finding.evidence[:MAX_EVIDENCE])]
    if len(finding.evidence) > MAX_EVIDENCE:
        lines.append(dim(f"   and {len(finding.evidence) - MAX_EVIDENCE} more (--json lists all)"))
    if finding.suggestions:
        lines.append(Text("   Suggested fixes:", style="green"))
        lines += [Text(f"   - {suggestion.text}", style="green") for suggestion in finding.suggestions]
    elif finding.fixes:
        lines.append(Text("   Suggested fixes: " + ", ".join(map(_format_fix_option, finding.fixes)), style="green"))
    return Group(*lines)


def _format_fix_option(name: str) -> str:
    """Return a fix as the value of `--fix`: its name, with `=N` if it needs a number."""
    fix = FIXES.get(name)
    return f"{name}=N" if fix is not None and fix.main_option in fix.required else name


def _render_evidence(evidence: Evidence) -> Text:
    text = Text("   - ").append(evidence.text)
    if evidence.source and short_source(evidence.source) not in evidence.text:
        text.append(f"  {short_source(evidence.source)}", style="dim")
    return text
