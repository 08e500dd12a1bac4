"""Two files of runs, laid side by side: the flow behind `memprof compare`.

    FILE -account, recordings-> Document or Recording -report/matching-> Run;  two of them -report-> Comparison

A capture is accounted for as `memprof show` does it, and a report in JSON becomes the document that it was: from there
both go through the same lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from memprof.errors import UsageError
from memprof.flows.account import analyze
from memprof.flows.recordings import GZIP, PICKLE, head_of, open_file
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.comparison import Comparison
from memprof.report.documents.report import SCHEMA, Document
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import Run, run_of_document, run_of_recording
from memprof.report.matching.tolerance import Tolerance
from memprof.trace.io import load_trace

_KINDS = "a capture (--save), a report (--json) of `memprof profile`, or a snapshot of torch"


def compare_files(
    a: Path, b: Path, tolerance: Tolerance, progress: Callable[[str], None] = lambda doing: None
) -> Comparison:
    """What differs between the runs in two files.

    Raises:
        UsageError: a file is not there, damaged, or none that can be compared.
    """
    runs = []
    for path in (a, b):
        progress(f"reading {path.name}")
        runs.append(open_run(path))
    return build_comparison(runs[0], runs[1], tolerance)


def open_run(path: Path) -> Run:
    """The run in a capture, a report or a snapshot.

    Raises:
        UsageError: it is none of these, or damaged.
    """
    head = head_of(path, _KINDS)
    if head.startswith(GZIP):
        try:
            return run_of_document(analyze(load_trace(path)), path.name, "memprof capture")
        except EmptyTraceError as error:
            raise UsageError(str(error.problem), value=path, hint="record it again") from None
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError("the capture is damaged", value=f"{path} ({error!r})", hint="record it again") from error
    if head.startswith(PICKLE):
        return _snapshot(path)
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        raise UsageError("neither a capture, a report nor a snapshot", value=path, hint=f"give {_KINDS}")
    return run_of_document(_report(path), path.name, "memprof report")


def _report(path: Path) -> Document:
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "the report is truncated or damaged", value=f"{path} ({error})", hint="write it again"
        ) from None
    if isinstance(report, dict) and report.get("command") == "analyze":
        raise UsageError(
            "a report of memprof analyze has not all that is compared",
            value=path,
            hint="give the capture or the snapshot that it is of",
        )
    if not isinstance(report, dict) or "peak" not in report or "stages" not in report:
        raise UsageError("not a report of memprof profile", value=path, hint=f"give {_KINDS}")
    schema = report.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise UsageError(
            "the report was written by a newer memprof",
            value=f"{path} (schema {schema}; this release reads up to {SCHEMA})",
            hint="update memprof",
        )
    try:
        return Document.from_json(report)
    except ValueError as error:
        raise UsageError("the report is damaged", value=f"{path} ({error})", hint="write it again") from error


def _snapshot(path: Path) -> Run:
    """The device of a snapshot that allocates most."""
    opened = open_file(path)
    one = max(opened.recordings, key=lambda recording: recording.peak()[0])
    notes = list(opened.origin.assumptions)
    if len(opened.recordings) > 1:
        notes.append(f"Of {len(opened.recordings)} devices, the one that allocates most is taken: {one.device}.")
    return run_of_recording(one, path.name, opened.origin.settings, tuple(notes), opened.origin.source)
