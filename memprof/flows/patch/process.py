"""The run of a changed program in a process of its own, which knows nothing of the run before."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from memprof.flows.account import analyze
from memprof.flows.patch.source import NoPatchError
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.trace.io import load_trace

_FAILED = (EndReason.ERROR, EndReason.NOT_SIMULATED, EndReason.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class PatchedRun:
    """What the process is to run: a program, with other texts of its files, and where to save the capture."""

    program: Program
    rule: StopRule
    spec: RunSpec
    texts: dict[str, str]  # by the file's name, and by its real path
    capture: Path


def run_patched(program: Program, rule: StopRule, spec: RunSpec, texts: dict[str, str], folder: str) -> Report:
    """Return the report on `program` in `folder`, with `texts` instead of what the files have.

    Raises NoPatchError: the program fails, or puts nothing on the GPU.
    """
    with tempfile.TemporaryDirectory(prefix="memprof-") as temporary:
        capture = Path(temporary) / "run.memprof"
        process = subprocess.run(
            [sys.executable, "-m", "memprof.flows.patch"],
            input=pickle.dumps(PatchedRun(program, rule, spec, texts, capture)),
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        trace = load_trace(capture) if capture.exists() else None
    facts = None if trace is None else trace.facts.program
    if trace is None or facts is None or facts.ended in [reason.value for reason in _FAILED]:
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise NoPatchError(f"the patched program fails: {reason}")
    return analyze(trace)
