"""Comparison of the runs in two files: the flow behind `memprof compare`.

    FILE -account, recordings-> Document or Recording -report/matching-> Run;  two of them -report-> Comparison

A capture is accounted for as by `memprof show`, and a report in JSON is read back as a document. The comparison then
treats both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memprof.errors import UsageError
from memprof.flows.recordings import GZIP_MAGIC, PICKLE_MAGIC, open_file, read_head
from memprof.flows.saved_files import is_json, load_capture, load_json
from memprof.report.documents.analysis import Analysis
from memprof.report.documents.comparison import Comparison
from memprof.report.documents.report import Report
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import ComparedRun, convert_recording, convert_report
from memprof.report.matching.tolerance import Tolerance

_KINDS = "a capture (--save), a report (--json) of `memprof profile`, or a snapshot of torch"


def compare_files(
    a: Path, b: Path, tolerance: Tolerance, progress: Callable[[str], None] = lambda doing: None
) -> Comparison:
    """Compare the runs in two files; raise UsageError if a file is missing, damaged, or cannot be compared."""
    progress(f"reading {a.name}")
    first = open_run(a)
    progress(f"reading {b.name}")
    return build_comparison(first, open_run(b), tolerance)


def open_run(path: Path) -> ComparedRun:
    """Return the run in a capture, a report or a snapshot; raise UsageError for damaged and other files."""
    head = read_head(path, _KINDS)
    if head.startswith(GZIP_MAGIC):
        return convert_report(load_capture(path), path.name, "memprof capture")
    if head.startswith(PICKLE_MAGIC):
        opened = open_file(path)
        one = max(opened.recordings, key=lambda recording: recording.peak()[0])
        notes = list(opened.origin.assumptions)
        if len(opened.recordings) > 1:
            notes.append(f"Of {len(opened.recordings)} devices, the one that allocates most is taken: {one.device}.")
        return convert_recording(one, path.name, opened.origin.settings, tuple(notes), opened.origin.source)
    if not is_json(head):
        raise UsageError("neither a capture, a report nor a snapshot", value=path, hint=f"give {_KINDS}")
    return convert_report(_load_report(path), path.name, "memprof report")


def _load_report(path: Path) -> Report:
    document = load_json(path)
    if isinstance(document, Analysis):
        hint = "give the capture or the snapshot that it is of"
        raise UsageError("a report of memprof analyze has not all that is compared", value=path, hint=hint)
    if isinstance(document, Comparison):
        raise UsageError("this is a comparison already", value=path, hint=f"give {_KINDS}")
    return document
