"""The flow of `--suggest-patch`: the edits of findings, made one after another in a copy that is run each time.

    Report -findings-> Edit -edit_source-> text -run in a new process-> Report, whose findings have the next edit

The program's files are read, and never written.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from memprof.findings import Severity
from memprof.findings.edits import Edit
from memprof.flows.patch.edit import edit_source
from memprof.flows.patch.process import run_patched
from memprof.flows.patch.source import NoPatchError, parse_source
from memprof.ledger.stages import format_stage
from memprof.report.documents.patch import PatchedNeed, SuggestedPatch
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.trace.events import short_source

# Python's message where an edit has given a tensor's method to what is no tensor.
_NO_TENSOR = re.compile(r"AttributeError: '(tuple|list|dict)' object has no attribute '(?:item|detach|cpu)'")

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
    tried: dict[tuple[str, str], str] = {}  # (file, text of the edit) -> why it is no part of the patch; "": it is
    num_runs = 0
    again: list[Edit] = []  # edits whose values have turned out to be containers
    while edit := again.pop() if again else _find_edit(current, tried):
        file, description = parse_source(edit.source)[0], f"{short_source(edit.source)}: {edit.text}"
        tried[file, edit.text] = ""
        try:
            changed = {
                **texts,
                **_edit_file(os.path.realpath(os.path.join(folder, file)), edit, texts, program, folder),
            }
            if num_runs == MAX_RUNS:
                raise NoPatchError(f"{MAX_RUNS} copies have been run")
            num_runs += 1
            progress(f"running a copy with a change in {short_source(edit.source)}")
            patched = run_patched(program, rule, spec, {**changed, **_name_as_run(changed, folder)}, folder)
            _check_better(patched, current)
        except NoPatchError as error:
            container = _NO_TENSOR.search(str(error))
            if container is not None and not edit.container:
                again.append(replace(edit, container=container[1]))
            tried[file, edit.text] = f"{description}: {error}"
            continue
        current, texts = patched, changed
        changes.append(description)
        if patched.fits_in_memory and not report.fits_in_memory:
            break
    diff, reasons = make_diff(texts, folder), tuple(filter(None, tried.values()))
    after = _read_need(current) if changes else None
    return SuggestedPatch(diff, tuple(changes), _read_need(report), after, reasons)


def _find_edit(report: Report, tried: Mapping[tuple[str, str], str]) -> Edit | None:
    edits = [finding.edit for finding in report.findings if finding.edit is not None]
    return next((edit for edit in edits if (parse_source(edit.source)[0], edit.text) not in tried), None)


def _edit_file(path: str, edit: Edit, texts: Mapping[str, str], program: Program, folder: str) -> dict[str, str]:
    """Return `path` with its text after `edit`. Raises NoPatchError: it is a library's file, or cannot be edited."""
    if "-packages" in path:
        raise NoPatchError("the line is a library's")
    try:
        text = texts[path] if path in texts else Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise NoPatchError("the file cannot be read") from error
    is_script = path in {os.path.realpath(os.path.join(folder, word)) for word in program.command}
    return {path: edit_source(text, edit, is_script=is_script)}


def _name_as_run(texts: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the texts by the names that files have in tracebacks of a program that is run in `folder`."""
    return {os.path.relpath(path, os.path.realpath(folder)): text for path, text in texts.items()}


def _read_need(report: Report) -> PatchedNeed:
    verdict, peak = report.verdict, report.peak
    runs_out = None if verdict.growth is None else verdict.growth.runs_out_step
    oom_step, stage = (None, None) if verdict.fits else (verdict.oom_step or runs_out, verdict.oom_stage)
    sizes = peak.allocated_bytes, peak.reserved_bytes, verdict.required_bytes
    return PatchedNeed(verdict.fits, *sizes, oom_step, stage, report.pages)


def _check_better(patched: Report, before: Report) -> None:
    """Raise NoPatchError unless a run fits that did not, or comes further, or needs less, and does as much."""
    known = {finding.id for finding in before.findings}
    for finding in patched.findings:
        if finding.severity is Severity.ERROR and finding.id not in known:
            raise NoPatchError(f"the patched program has another error: {finding.title}")
    program, old_program = patched.program, before.program
    if program is not None and old_program is not None:
        if program.exit_code not in (0, old_program.exit_code):
            raise NoPatchError(f"the patched program ends with exit code {program.exit_code}")
        is_cut = old_program.ended == EndReason.REFUSED.value  # in a step that had begun
        if program.ended == EndReason.EXIT.value and program.steps < old_program.steps - is_cut:
            raise NoPatchError(f"the patched program ends after {program.steps} training steps")
    new, old = _read_need(patched), _read_need(before)
    reached = [(need.oom_step or 0, len(report.stages)) for need, report in ((new, patched), (old, before))]
    if not old.fits and (new.fits or reached[0] > reached[1]):
        return
    if not new.fits and new.oom_stage is not None:
        stage = format_stage(new.oom_stage, new.oom_step or 0)
        raise NoPatchError(f"the patched program runs out of memory too, in {stage}")
    if not new.fits or new.required_bytes >= old.required_bytes:
        raise NoPatchError("the patched program needs as much")


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
