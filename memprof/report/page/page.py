"""A document as one self-contained HTML page, which needs no network.

Runs are shown at any moment (page.html), other documents in sections (answer.html). Data and plotly are compressed and
base64-encoded: the file is a third as large, and no name from a program can close its HTML element. Scripts insert text
as text nodes, never as HTML.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from memprof.errors import UsageError, printable
from memprof.findings import Finding
from memprof.fixes.catalog import ALL_FIXES
from memprof.report.documents.analysis import Analysis
from memprof.report.documents.comparison import Comparison
from memprof.report.documents.recommendation import Recommendation
from memprof.report.documents.report import Report
from memprof.report.documents.sweep import Sweep
from memprof.report.page.figures import COLOURS
from memprof.report.page.file_kind import PAGE, PAGE_START
from memprof.report.page.library import read_plotly_script
from memprof.report.page.moments import Moments, build_moments, find_kinds
from memprof.report.page.sections import build_sections
from memprof.report.page.segments import build_segments_at_peak
from memprof.report.page.sweep import build_sweep_sections
from memprof.report.terminal import analysis, comparison, recommendation, sweep
from memprof.report.terminal.console import to_text
from memprof.report.terminal.heading import render_heading
from memprof.report.terminal.next_step import choose_next_step
from memprof.report.terminal.report import render
from memprof.trace.files import write_atomically
from memprof.trace.json_values import to_plain

_MAX_ROWS = 1000  # Rows of a table: more than any comparison has.
_UNWRAPPED_WIDTH = 10_000  # Columns of a text that the browser breaks into lines.
# A body and its scripts, which become one function.
_RUN_FILES = ("page.html", "base.js", "moments.js", "figures.js", "segments.js", "ladder.js", "page.js")
_SECTION_FILES = ("answer.html", "base.js", "answer.js")
SectionsDocument = Comparison | Analysis | Recommendation | Sweep  # Documents with a page in sections.
PageDocument = Report | SectionsDocument  # Documents with a page.


def write_page(document: PageDocument, path: Path, *, force: bool = False) -> None:
    """Write the page of a document; `force` also replaces a file that memprof has not written.

    Raises UsageError: the report is from JSON, which has no moments; another file is at `path`; plotly is not
    installed. MemprofError: the file cannot be written.
    """
    write_atomically(path, render_page(document).encode(), PAGE, force=force)


def render_page(document: PageDocument) -> str:
    """Return a document as an HTML page. Raises UsageError: the report is from JSON, or plotly is not installed."""
    data = _make_printable(build_run_data(document) if isinstance(document, Report) else build_sections_data(document))
    body, *scripts = _RUN_FILES if isinstance(document, Report) else _SECTION_FILES
    return f"""{PAGE_START}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(data["heading"][0])}</title>
<style>
{_read_file("page.css")}</style>
</head>
<body>
{_read_file(body)}<script type="application/octet-stream" id="data">{_compress(json.dumps(data).encode())}</script>
<script type="application/octet-stream" id="library">{_compress(read_plotly_script())}</script>
<script>
"use strict";
(async () => {{
{"".join(map(_read_file, scripts))}}})().catch(error => {{
  document.getElementById("verdict").textContent =
    `This page could not be shown: ${{error}}. It needs a browser of 2023 or newer (DecompressionStream).`;
  throw error;
}});
</script>
</body>
</html>
"""


def build_sections_data(document: SectionsDocument) -> dict[str, Any]:
    """Return the data of a document that is shown in sections for the page's script, as JSON values."""
    if isinstance(document, Comparison):
        lines, is_good = split_lines(comparison.render_heading(document)), document.within
        verdict = split_lines(comparison.render(document, quiet=True))
        text = to_text(comparison.render(document, top=_MAX_ROWS))
    elif isinstance(document, Analysis):
        lines, is_good = [f"memprof analyze: {document.file}, a {document.format}"], not document.ran_out
        verdict, text = split_lines(analysis.render(document, quiet=True)), to_text(analysis.render(document))
    elif isinstance(document, Sweep):
        lines, is_good = split_lines(sweep.render_axes(document)), document.num_fitting > 0
        verdict, text = split_lines(sweep.render(document, quiet=True)), to_text(sweep.render(document, explain=True))
    else:
        lines, is_good = split_lines(recommendation.render_heading(document)), document.has_result
        verdict = recommendation.format_verdict_lines(document)
        text = to_text(recommendation.render(document, explain=True))
    sections = build_sweep_sections(document) if isinstance(document, Sweep) else build_sections(document)
    return {
        "heading": lines,
        "verdict": "\n".join(verdict),
        "good": is_good,
        "sections": [section.to_json() for section in sections],
        "text": text,
    }


def split_lines(view: RenderableType) -> list[str]:
    """Return the non-empty lines of `view`, unwrapped and without indentation."""
    return [line.strip() for line in to_text(view, width=_UNWRAPPED_WIDTH).strip().splitlines() if line.strip()]


def build_run_data(document: Report) -> dict[str, Any]:
    """Return the data of a run for the page's script, as JSON values. Raises UsageError: the report is from JSON."""
    ledger = document.ledger
    if ledger is None:
        hint = "keep the capture (--save), and show that: memprof show run.memprof --html run.html"
        raise UsageError("a report in JSON has no moments to show", value="--html", hint=hint)
    moments = build_moments(ledger)
    device = document.device
    return {
        "heading": to_text(render_heading(document), width=_UNWRAPPED_WIDTH).strip().splitlines(),
        "verdict": to_text(render(document, quiet=True), width=_UNWRAPPED_WIDTH).strip(),
        "fits": document.verdict.fits if document.failure is None else False,
        "capacity": {"total": device.total_bytes, "usable": device.usable_bytes, "name": device.name},
        "context": document.peak.device_used_bytes - document.peak.reserved_bytes,
        "on_cpu": document.on_cpu,
        "colours": COLOURS,
        "moments": moments.to_json(),
        "findings": [_build_finding_data(moments, finding) for finding in document.findings],
        "ladder": to_plain(document.ladder),
        "gpus": to_plain(document.gpus),
        "ranks": to_plain(document.ranks),
        "segments": None if document.on_cpu else build_segments_at_peak(ledger, moments).to_json(),
        "next": choose_next_step(document),
        "text": str(document),
    }


def _build_finding_data(moments: Moments, finding: Finding) -> dict[str, Any]:
    fixes = {name: fix.changes if (fix := ALL_FIXES.get(name)) else "" for name in finding.fixes}
    shown = {text: effect for text, _, effect in (one.text.partition(": ") for one in finding.suggestions)}
    return {
        "severity": finding.severity.value,
        "title": finding.title,
        "evidence": [{"text": evidence.text, "kinds": find_kinds(moments, evidence)} for evidence in finding.evidence],
        "fixes": [{"name": name, "changes": changes} for name, changes in (shown or fixes).items()],
    }


def _make_printable(value: Any) -> Any:
    """Return a JSON value with control characters in strings escaped (U+202E would reverse text in a browser)."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_make_printable(name): _make_printable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [item if isinstance(item, int) else _make_printable(item) for item in value]
    return value


def _compress(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _read_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
