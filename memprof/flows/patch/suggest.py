"""The flow of `--suggest-patch`: the edits of findings, made one after another in a copy that is run each time.

    Report -findings-> Edit -edit_source-> text -run in a new process-> Report, whose findings have the next edit

The program's files are read, and never written.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from memprof.errors import MemprofError
from memprof.findings.edits import Edit
from memprof.flows.patch.edit import edit_source
from memprof.flows.patch.process import run_patched
from memprof.flows.patch.source import NoPatchError, parse_source
from memprof.ledger.stages import format_stage
from memprof.report.documents.patch import PatchedNeed, SuggestedPatch
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program, StopRule
from memprof.trace.events import short_source

MAX_RUNS = 6  # of patched copies; each takes as long as the program's own run


def suggest_patch(
    program: Program, rule: StopRule, spec: RunSpec, report: Report, folder: str, progress: Callable[[str], None]
) -> SuggestedPatch:
    """Return the patch of the edits that help, of the findings of `report`, most decisive first, until the run fits.

    `report` is that of the program's own run, which began in `folder`.
    """
    current = report
    texts: dict[str, str] = {}  # by the real path of the file
    changes: list[str] = []
    tried: dict[tuple[str, str], str] = {}  # (file, text of the edit) -> why it was not made
    num_runs = 0
    while edit := _find_edit(current, tried):
        file, _ = parse_source(edit.source)
        description = f"{short_source(edit.source)}: {edit.text}"
        try:
            path = os.path.realpath(os.path.join(folder, file))
            is_script = path in {os.path.realpath(os.path.join(folder, word)) for word in program.command}
            changed = {**texts, path: edit_source(texts.get(path) or _read_own_file(path), edit, is_script=is_script)}
            if num_runs == MAX_RUNS:
                raise NoPatchError(f"{MAX_RUNS} copies have been run")
            num_runs += 1
            progress(f"running a copy with a change in {short_source(edit.source)}")
            patched = run_patched(program, rule, spec, {**changed, **_name_as_run(changed, folder)}, folder)
        except (NoPatchError, MemprofError) as error:
            value = getattr(error, "value", None)
            tried[file, edit.text] = (
                f"{description}: {error if value is None else f'the patched program fails: {value}'}"
            )
            continue
        tried[file, edit.text] = f"{description}: {_describe_failure(patched)}"
        if _is_better(patched, current):
            current, texts = patched, changed
            changes.append(description)
            tried[file, edit.text] = ""
            if patched.verdict.fits and not report.verdict.fits:
                break
    after = _read_need(current) if changes else None
    return SuggestedPatch(
        make_diff(texts, folder), tuple(changes), _read_need(report), after, tuple(filter(None, tried.values()))
    )


def _find_edit(report: Report, tried: Mapping[tuple[str, str], str]) -> Edit | None:
    edits = [finding.edit for finding in report.findings if finding.edit is not None]
    return next((edit for edit in edits if (parse_source(edit.source)[0], edit.text) not in tried), None)


def _read_own_file(path: str) -> str:
    """Return the text of a file of the program. Raises NoPatchError: it is a library's, or cannot be read."""
    if "-packages" in path:
        raise NoPatchError("the line is a library's")
    try:
        return Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise NoPatchError("the file cannot be read") from error


def _name_as_run(texts: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the texts by the names that files have in tracebacks of a program that is run in `folder`."""
    return {os.path.relpath(path, os.path.realpath(folder)): text for path, text in texts.items()}


def _read_need(report: Report) -> PatchedNeed:
    verdict, peak = report.verdict, report.peak
    runs_out = None if verdict.growth is None else verdict.growth.runs_out_step
    oom_step = None if verdict.fits else verdict.oom_step or runs_out
    return PatchedNeed(verdict.fits, peak.allocated_bytes, peak.reserved_bytes, verdict.required_bytes, oom_step)


def _is_better(patched: Report, before: Report) -> bool:
    """Return whether a run fits that did not, comes further, or needs less, without an error that is new."""
    known = {finding.id for finding in before.findings}
    if any(finding.severity.value == "error" and finding.id not in known for finding in patched.findings):
        return False
    new, old = _read_need(patched), _read_need(before)
    if bool(new.fits) != bool(old.fits):
        return bool(new.fits)
    if not new.fits and (new.oom_step or 0) != (old.oom_step or 0):
        return (new.oom_step or 0) > (old.oom_step or 0)
    return new.required_bytes < old.required_bytes


def _describe_failure(patched: Report) -> str:
    """Return why a patch that was run does not help."""
    verdict = patched.verdict
    if verdict.fits or verdict.oom_stage is None:
        return "the patched program needs as much"
    return f"the patched program runs out of memory too, in {format_stage(verdict.oom_stage, verdict.oom_step or 0)}"


def make_diff(texts: Mapping[str, str], folder: str) -> str:
    """Return the unified diff from the files to `texts`, with the names of files relative to `folder`."""
    diff = []
    for path, text in texts.items():
        inside = Path(path).is_relative_to(os.path.realpath(folder))
        name = os.path.relpath(path, os.path.realpath(folder)) if inside else os.path.basename(path)
        lines = difflib.unified_diff(
            _split_lines(Path(path).read_bytes().decode()), _split_lines(text), f"a/{name}", f"b/{name}"
        )
        diff += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(diff)


def _split_lines(text: str) -> list[str]:
    """Return the lines with their ends; other characters that end lines elsewhere (form feeds) are part of a line."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
