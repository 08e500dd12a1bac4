"""Programs with the memory problems of public bug reports, and what memprof has to say of them first.

A program begins with a comment whose first line has the report, as `owner/name#number: what was wrong`, and then a line
for each of

    # resolved: what the thread found to help
    # run: options of `memprof run`
    # first: ids of findings, one of which is the first
    # fix: words, some of which the first finding has to say: they are what the report was resolved with
    # not: fixes that no finding may suggest, since they cannot help
    # also: ids of findings that may follow, for they are true of the program as well

Alternatives are separated by ` | `, fixes and ids of `not` and `also` by blanks. The line to change ends with
`# <- cause`; where there are several such lines, one of them has to be named.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.headers import read_header
from tests.processes import python

PROGRAMS = Path(__file__).resolve().parent / "programs"
_REQUIRED = {"resolved", "run", "first", "fix"}
_OPTIONAL = {"not", "also"}


@dataclass(frozen=True)
class Report:
    """A program, and what memprof should say of it."""

    path: Path
    source: str
    options: tuple[str, ...]
    first: tuple[str, ...]
    fixes: tuple[str, ...]
    useless_fixes: tuple[str, ...]
    others: tuple[str, ...]
    causes: tuple[str, ...]  # as findings name a line, `file.py:12`


def read(path: Path) -> Report:
    """Return what a program's header says; raises ValueError if it is not understood, or there is no cause."""
    lines = path.read_text(encoding="utf-8").splitlines()
    source = re.fullmatch(r"# ([\w.-]+/[\w.-]+#\d+): .+", lines[0])
    said = read_header(lines)
    causes = tuple(f"{path.name}:{n}" for n, line in enumerate(lines, 1) if line.endswith("# <- cause"))
    if source is None or said.keys() - _REQUIRED - _OPTIONAL or _REQUIRED - said.keys() or not causes:
        raise ValueError(f"{path}: says {', '.join(said)}, with {len(causes)} causes")
    return Report(
        path=path,
        source=source[1],
        options=tuple(said["run"].split()),
        first=tuple(said["first"].split(" | ")),
        fixes=tuple(said["fix"].split(" | ")),
        useless_fixes=tuple(said.get("not", "").split()),
        others=tuple(said.get("also", "").split()),
        causes=causes,
    )


def list_reports() -> dict[str, Report]:
    """Return program name -> report of all programs."""
    return {path.stem: read(path) for path in sorted(PROGRAMS.glob("*.py"))}


def run(report: Report, folder: Path) -> dict[str, Any]:
    """Return what `memprof run --json` says of the program; raises AssertionError if it says nothing."""
    done = python("-m", "memprof", "run", "--json", *report.options, report.path, folder=folder)
    assert done.stdout, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def list_mistakes(report: Report, findings: list[dict[str, Any]]) -> list[str]:
    """Return what is not right of the findings, a line for each."""
    if not findings:
        return ["no findings"]
    wrong = [_list_faults(report, one) for one in findings]
    right = next((number for number, faults in enumerate(wrong) if not faults), 0)
    mistakes = wrong[right]
    if right:
        mistakes = [f"the cause is finding {right + 1}, after {', '.join(one['id'] for one in findings[:right])}"]
    true = {"does-not-fit", *report.others}
    others = [one for number, one in enumerate(findings) if number != right]
    mistakes += [f"{one['id']} is false" for one in others if one["id"] not in true]
    mistakes += [f"{fix} cannot help" for one in findings for fix in one["fixes"] if fix in report.useless_fixes]
    return mistakes


def _list_faults(report: Report, finding: dict[str, Any]) -> list[str]:
    """Return why a finding does not tell the cause; empty if it does."""
    text = " ".join(_list_texts(finding))
    faults = []
    if finding["id"] not in report.first:
        faults.append(f"{finding['id']} is first, not {' or '.join(report.first)}")
    if not any(re.search(rf"\b{re.escape(cause)}\b", text) for cause in report.causes):
        faults.append(f"the first finding does not name {' or '.join(report.causes)}")
    if not any(fix.lower() in text.lower() for fix in report.fixes):
        faults.append(f"the first finding does not say {' or '.join(report.fixes)}")
    return faults


def _list_texts(finding: dict[str, Any]) -> list[str]:
    """Return the title, evidence, fixes and suggestions of a finding, with the line of each piece of evidence."""
    evidence = [f"{one['text']} {one['source']}" for one in finding["evidence"]]
    suggestions = [one["text"] for one in finding.get("suggestions", ())]
    return [finding["title"], *evidence, *finding["fixes"], *suggestions]
