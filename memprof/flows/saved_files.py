"""Reports from saved files: a capture is analyzed again, and a report in JSON is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import UsageError
from memprof.trace.files import GZIP_MAGIC, read_head

# What reads a document is imported where one is read: a file of another kind is refused without it.
if TYPE_CHECKING:
    from memprof.report.documents.analysis import Analysis
    from memprof.report.documents.comparison import Comparison
    from memprof.report.documents.report import Report
    from memprof.report.documents.sweep import Sweep

    SavedDocument = Report | Analysis | Comparison | Sweep
_FILE_KINDS = "a capture (--save), or what profile, run, analyze, compare or sweep write with --json"


def load(
    path: str | Path, *, alloc_conf: str | None = None, gpu: int | None = None, rank: int | None = None
) -> SavedDocument:
    """Return the document in a JSON file of `save()` or `--json`, or the report of a capture, computed again.

    Needs neither torch nor the model.

    Args:
        path: the file.
        alloc_conf: settings of the caching allocator instead of the run's; for a capture alone.
        gpu: index of the GPU shown in full; None: the GPU with the highest usage. For a capture alone.
        rank: rank shown in full, of several; None: the rank with the highest need. For a capture alone.

    Raises:
        UsageError: the file is of another kind, or damaged; torch would refuse `alloc_conf`; unknown GPU or rank.

    Example:
        with memprof.virtual_gpu("rtx-4090") as gpu:
            layer = torch.nn.Linear(4096, 4096).cuda()
        gpu.save("layer.memprof")
        print(memprof.load("layer.memprof"))
    """
    path = Path(path)
    head = read_head(path, _FILE_KINDS)
    if head.startswith(GZIP_MAGIC):
        return load_capture(path, alloc_conf, gpu, rank)
    if not is_json(head):
        raise UsageError("not a memprof capture or report", value=path, hint=f"give {_FILE_KINDS}")
    if (alloc_conf, gpu, rank) != (None, None, None):
        raise UsageError(
            "only a capture can be accounted for anew", value=path, hint="leave settings, GPU and rank out"
        )
    return load_json(path)


def is_json(head: bytes) -> bool:
    """Return whether a file that begins with `head` may be JSON."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"["))


def load_capture(path: Path, alloc_conf: str | None = None, gpu: int | None = None, rank: int | None = None) -> Report:
    """Return the report of a capture; raise UsageError if the file is no capture, damaged or empty."""
    from memprof.flows.account import analyze
    from memprof.ledger.ledger import EmptyTraceError
    from memprof.trace.io import load_trace

    try:
        return analyze(load_trace(path), alloc_conf, gpu=gpu, rank=rank)
    except EmptyTraceError as error:
        raise UsageError(str(error.problem), value=path, hint="record it again") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError("the capture is damaged", value=f"{path} ({error!r})", hint="record it again") from error


def load_json(path: Path) -> SavedDocument:
    """Return the report in a JSON file; raise UsageError if the file is no report, damaged or of a newer release."""
    try:
        json_value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "the report is truncated or damaged", value=f"{path} ({error})", hint="write it again"
        ) from None
    from memprof.report.documents import analysis, comparison, sweep
    from memprof.report.documents.report import SCHEMA, Report
    from memprof.trace.old_names import rename_old

    # Value of `command` in the JSON -> type of the document, and the newest schema that is read.
    other_documents: dict[str, tuple[type[Analysis | Comparison | Sweep], int]] = {
        "analyze": (analysis.Analysis, analysis.SCHEMA),
        "compare": (comparison.Comparison, comparison.SCHEMA),
        "sweep": (sweep.Sweep, sweep.SCHEMA),
    }
    command = str(json_value.get("command")) if isinstance(json_value, dict) else ""
    document_type, newest_schema = other_documents.get(command, (Report, SCHEMA))
    required_keys = {"schema", "peak", "stages"} if document_type is Report else {"schema"}
    if not isinstance(json_value, dict) or not required_keys <= set(json_value):
        raise UsageError("not a report of memprof profile", value=path, hint=f"give {_FILE_KINDS}")
    schema = json_value["schema"]
    if not isinstance(schema, int) or schema > newest_schema:
        raise UsageError(
            "the report was written by a newer memprof",
            value=f"{path} (schema {schema}; this release reads up to {newest_schema})",
            hint="update memprof",
        )
    try:
        return document_type.from_json(json_value if schema == newest_schema else rename_old(json_value))
    except ValueError as error:
        raise UsageError("the report is damaged", value=f"{path} ({error})", hint="write it again") from error
