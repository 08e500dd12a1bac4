"""A process that runs a changed program and saves its capture: `python -m memprof.flows.patch`, a request on stdin."""

from __future__ import annotations

import os
import pickle
import sys

from memprof.flows.patch.process import PatchedRun
from memprof.flows.script import run_script
from memprof.patching import PatchSet
from memprof.script.changed_files import change_files, show_changed_lines
from memprof.trace.io import save_trace


def main() -> None:
    """Run the request that stdin has (a pickled PatchedRun)."""
    request: PatchedRun = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    show_changed_lines(request.texts)
    with PatchSet() as patches:
        patches.apply_all(change_files(request.texts))
        result = run_script(request.program, request.rule, request.spec)
    if result.outcome.error is not None:
        sys.stderr.write(f"{type(result.outcome.error).__name__}: {result.outcome.error}\n")
    if result.document is not None:
        save_trace(result.trace, request.capture)
    sys.stdout.flush()
    os._exit(0)  # the program's threads may still run


if __name__ == "__main__":
    main()
