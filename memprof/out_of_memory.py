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

MAX_ENTRIES = 100_000  # allocations and frees that are kept, the last ones
_SNAPSHOT = FileKind(
    "snapshot", 'snapshot="oom.pickle"', lambda begin, end: begin.startswith(PICKLE_MAGIC), "remove it"
)


class OomExplainer:
    """Torch's record of allocations and frees with their Python stacks, and what it explains where memory runs out.

    Raises UsageError: `snapshot` cannot be written, or is another file than a snapshot.
    """

    def __init__(self, snapshot: str | os.PathLike[str], max_entries: int = MAX_ENTRIES) -> None:
        self._path = Path(snapshot)
        self._max_entries = max_entries
        check_output_path(self._path, _SNAPSHOT)

    def start(self) -> None:
        """Let torch record; needs a GPU, or a virtual one."""
        torch_private_cuda.record_memory_history.get()(max_entries=self._max_entries, stacks="python")

    def stop(self) -> None:
        """Let torch record no longer."""
        torch_private_cuda.record_memory_history.get()(enabled=None)

    def explain(self, error: BaseException) -> None:
        """Write the snapshot, and print on stderr why memory ran out; `error` is torch's OutOfMemoryError."""
        try:
            write_atomically(self._path, pickle.dumps(torch_private_cuda.snapshot.get()()), _SNAPSHOT)
            text = _explain(self._path, error)
        except (MemprofError, OSError) as problem:  # which must not take the error's place
            text = f"memprof: the snapshot could not be explained: {problem}"
        print_text(text, sys.stderr)


@contextlib.contextmanager
def catch_oom(snapshot: str | os.PathLike[str] = "oom.pickle", *, max_entries: int = MAX_ENTRIES) -> Iterator[None]:
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

    explainer = OomExplainer(snapshot, max_entries)
    if not torch.cuda.is_available():
        yield
        return
    explainer.start()
    try:
        yield
    except torch.OutOfMemoryError as error:
        explainer.explain(error)
        raise
    finally:
        explainer.stop()


def _explain(path: Path, error: BaseException) -> str:
    """Return the analysis of the snapshot at `path`, and what the doctor has to say of the error's traceback."""
    document = analyze_file(path, AnalysisRequest(at="oom"))
    text = to_text(analysis_brief.render(document, file=path), output_width())
    log = "".join(traceback.format_exception(error))  # which names the script
    diagnoses, _ = diagnose_log(io.BytesIO(log.encode(errors="replace")), "the error")
    steps = render_steps(diagnoses[0]) if diagnoses else []
    return "\n".join([text.rstrip("\n"), *steps])
