"""Comparison of the runs in two files: the flow behind `memprof compare`.

    FILE -account, recordings-> Report or Recording -report/matching-> ComparedRun;  two runs -report-> Comparison

A capture is analyzed as by `memprof show`; a report in JSON is read back. The comparison then treats them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memprof.errors import UsageError
from memprof.flows.recordings import open_file
from memprof.flows.saved_files import is_json, load_capture, load_json
from memprof.report.documents.analysis import Analysis
from memprof.report.documents.comparison import Comparison
from memprof.report.documents.report import Report
from memprof.report.documents.sweep import Sweep
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import ComparedRun, convert_recording, convert_report
from memprof.report.matching.tolerance import Tolerance
from memprof.trace.files import GZIP_MAGIC, PICKLE_MAGIC, read_head

_FILE_KINDS = "a capture (--save), a report (--json) of `memprof profile`, or a snapshot of torch"


def compare_files(
    first_path: Path, second_path: Path, tolerance: Tolerance, progress: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Compare the runs in two files; raise UsageError if a file is missing, damaged, or cannot be compared."""
    progress(f"reading {first_path.name}")
    first_run = open_run(first_path)
    progress(f"reading {second_path.name}")
    return build_comparison(first_run, open_run(second_path), tolerance)


def open_run(path: Path) -> ComparedRun:
    """Return the run in a capture, report or snapshot; raise UsageError if the file is damaged or of another kind."""
    head = read_head(path, _FILE_KINDS)
    if head.startswith(GZIP_MAGIC):
        return convert_report(load_capture(path), path.name, "memprof capture")
    if head.startswith(PICKLE_MAGIC):
        file = open_file(path)
        one = max(file.recordings, key=lambda recording: recording.peak()[0])
        notes = list(file.origin.assumptions)
        if len(file.recordings) > 1:
            notes.append(f"Of {len(file.recordings)} devices, the one that allocates most is taken: {one.device}.")
        return convert_recording(one, path.name, file.origin.settings, tuple(notes), file.origin.source)
    if not is_json(head):
        raise UsageError("neither a capture, a report nor a snapshot", value=path, hint=f"give {_FILE_KINDS}")
    return convert_report(_load_report(path), path.name, "memprof report")


def _load_report(path: Path) -> Report:
    document = load_json(path)
    if isinstance(document, Analysis):
        hint = "give the capture or the snapshot that it is of"
        raise UsageError("a report of memprof analyze has not all that is compared", value=path, hint=hint)
    if isinstance(document, Comparison):
        raise UsageError("this is a comparison already", value=path, hint=f"give {_FILE_KINDS}")
    if isinstance(document, Sweep):
        raise UsageError("this is the table of a sweep", value=path, hint=f"give {_FILE_KINDS}")
    return document
