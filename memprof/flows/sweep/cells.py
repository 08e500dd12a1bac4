"""The answer to one cell: a pure function of its question and the versions, which any worker may run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError
from memprof.findings import Severity
from memprof.flows.cost import compute_step_work, find_bottleneck
from memprof.flows.gpus import find_host_bytes, find_spec_gpu
from memprof.flows.ladder.requested import SEARCH, resolve_fixes, run_requested
from memprof.flows.sweep.questions import NO_FIX, Question, describe_differences, read_versions
from memprof.report.documents.report import Report
from memprof.report.documents.sweep import CellAnswer
from memprof.run_spec import RunSpec
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.watch.collection import disable_garbage_collection, freeze_existing_objects

# A virtual GPU belongs to a process: threads of one worker answer one after another.
_ONE_AT_A_TIME = threading.Lock()


def answer_cell(question: dict[str, Any], versions: dict[str, str], attempt: int = 0) -> dict[str, Any]:
    """Return the `CellAnswer` to a question as JSON, or `refused`: why this worker may not answer.

    A cell that fails is an answer too. `attempt` tells an executor that the call is another one than the last.
    """
    differences = describe_differences(versions, read_versions())
    if differences:
        return {"refused": f"worker {socket.gethostname()}, process {os.getpid()}: {differences}"}
    with _ONE_AT_A_TIME, disable_garbage_collection():
        begin = time.perf_counter()
        try:
            values = _answer(Question.from_json(question)).to_json()
        except MemprofError as error:
            values = CellAnswer("failed", None, reason=error.line).to_json()
        if multiprocessing.parent_process() is not None:  # a worker's own process, which goes on with other cells
            freeze_existing_objects()  # collects reference cycles of the run
        return values | {"run_seconds": round(time.perf_counter() - begin, 3)}


def _answer(question: Question) -> CellAnswer:
    if question.run is not None:
        return _answer_script(question)
    assert question.spec is not None
    # The settings of the caller's environment are in the spec: those of this worker's do not count.
    spec = question.spec if question.spec.alloc_conf is not None else question.spec.edit(alloc_conf="")
    spec, fixes = resolve_fixes(spec, None if question.fix == NO_FIX else question.fix)
    return _build_answer(*run_requested(spec, fixes, searches=question.fix == SEARCH), spec)


def _answer_script(question: Question) -> CellAnswer:
    from memprof.fixes.chosen import parse_fixes
    from memprof.flows.ladder.runs import apply_fixes
    from memprof.flows.ladder.scripts import ScriptRuns, run_script_process, search_script_fixes
    from memprof.script import Program

    assert question.run is not None
    is_module = question.program[0] == "-m"
    program = Program(question.program[is_module], question.program[1 + is_module :], is_module)
    spec = question.run
    with contextlib.chdir(Path(question.folder)):
        if question.fix == NO_FIX:
            return _build_answer(*run_script_process(program, spec), spec)
        if question.fix != SEARCH:
            return _build_answer(*apply_fixes(ScriptRuns(program, spec, _ignore), parse_fixes(question.fix)), spec)
        if spec.host_memory_bytes is None:
            spec = spec.edit(host_memory_bytes=find_host_bytes(find_spec_gpu(spec)))
        return _build_answer(*search_script_fixes(program, spec, _ignore), spec)


def _ignore(work: str) -> None:
    """Report no progress: the sweep counts cells."""


def _build_answer(trace: Trace, document: Report, spec: TargetSpec | RunSpec) -> CellAnswer:
    """Return the answer that a run's report gives; as in the exit code of `memprof profile`, an error of the program is
    no verdict."""
    verdict, total_bytes = document.verdict, document.device.total_bytes
    error = next((finding.title for finding in document.findings if finding.severity is Severity.ERROR), "")
    fits = document.fits_in_memory if document.failure is None else None
    reason = find_bottleneck(document).text
    if fits and error:
        fits, reason = None, error
    elif fits is False and document.ladder_reason:
        reason = document.ladder_reason
    if document.ladder:
        step_seconds = document.ladder[-1].cost.step_seconds
    else:
        work = compute_step_work(trace, find_spec_gpu(spec))
        step_seconds = None if work is None else work.seconds
    return CellAnswer(
        how="run",
        fits=fits,
        needed_bytes=verdict.required_bytes,
        headroom_bytes=None if total_bytes is None else total_bytes - verdict.required_bytes,
        step_seconds=step_seconds,
        fixes=document.ladder[-1].fixes if document.ladder else (),
        reason=reason,
        pages=fits is False and verdict.fits is True,
    )
