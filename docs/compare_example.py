"""Prints what docs/compare.md shows: a small training run before and after a fix, side by side.

python docs/compare_example.py
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

from memprof.cli.main import run

MODEL = ["--model", "pythia-70m", "--context-length", "2048", "--batch-size", "4", "--gpu-vram", "16"]
CHANGE = ["--activation-checkpointing"]


def main() -> int:
    """Record both and compare them; the exit code of a comparison that finds differences is 4."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = (Path(folder) / name for name in ("before.memprof", "after.memprof"))
        quiet = io.StringIO()
        for file, options in ((before, []), (after, CHANGE)):
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
                run(["profile", *MODEL, *options, "--json", "--save", str(file)])
        try:
            run(["compare", str(before), str(after), "--full", "--top", "6"])
        except SystemExit as done:
            return 0 if done.code == 4 else 2
    return 2


if __name__ == "__main__":
    sys.exit(main())
