"""`memprof.catch_oom`: a snapshot and an explanation where torch runs out of GPU memory inside a block of code."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from memprof.doctor import diagnose_log
from memprof.errors import MemprofError
from memprof.flows.recordings import analyze_file
from memprof.report.documents.analysis_build import AnalysisRequest
from memprof.report.terminal import analysis_brief
from memprof.report.terminal.console import print_text, to_text
from memprof.report.terminal.doctor import render_steps
from memprof.report.terminal.layout import output_width
from memprof.torch_private import cuda as torch_private_cuda
from memprof.trace.files import PICKLE_MAGIC, FileKind, check_output_path, write_atomically

_SNAPSHOT = FileKind(
    "snapshot", 'snapshot="oom.pickle"', lambda begin, end: begin.startswith(PICKLE_MAGIC), "remove it"
)


@contextlib.contextmanager
def catch_oom(snapshot: str | os.PathLike[str] = "oom.pickle", *, max_entries: int = 100_000) -> Iterator[None]:
    """Explain on stderr why torch runs out of GPU memory in the block, and keep a snapshot of the memory.

    The error itself goes on. Inside the block torch records each allocation and free with its Python stack
    (`torch.cuda.memory._record_memory_history`), which costs a few microseconds for each. Works on a GPU and on a
    virtual one; without either it does nothing.

    Args:
        snapshot: the file to write; `memprof analyze` and https://pytorch.org/memory_viz read it.
        max_entries: the number of allocations and frees to keep, the last ones.

    Raises:
        UsageError: `snapshot` cannot be written, or is another file than a snapshot.

    Example:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with memprof.catch_oom():
            print(torch.nn.Linear(4096, 4096, device=device)(torch.zeros(64, 4096, device=device)).shape)
    """
    import torch

    path = Path(snapshot)
    check_output_path(path, _SNAPSHOT)
    if not torch.cuda.is_available():
        yield
        return
    record = torch_private_cuda.record_memory_history.get()
    record(max_entries=max_entries, stacks="python")
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            write_atomically(path, pickle.dumps(torch_private_cuda.snapshot.get()()), _SNAPSHOT)
            text = _explain(path, error)
        except (MemprofError, OSError) as problem:  # which must not take the error's place
            text = f"memprof: the snapshot could not be explained: {problem}"
        print_text(text, sys.stderr)
        raise
    finally:
        record(enabled=None)


def _explain(path: Path, error: BaseException) -> str:
    """Return the analysis of the snapshot at `path`, and what the doctor has to say of the error's traceback."""
    document = analyze_file(path, AnalysisRequest(at="oom"))
    text = to_text(analysis_brief.render(document, file=path), output_width())
    log = "".join(traceback.format_exception(error))  # which names the script
    diagnoses, _ = diagnose_log(io.BytesIO(log.encode(errors="replace")), "the error")
    steps = render_steps(diagnoses[0]) if diagnoses else []
    return "\n".join([text.rstrip("\n"), *steps])
