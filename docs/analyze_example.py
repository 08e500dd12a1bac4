"""Prints what docs/analyze.md shows: a small simulated training run, recorded and taken apart.

python docs/analyze_example.py
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

from memprof.cli.main import run

MODEL = ["--model", "pythia-70m", "--context-length", "2048", "--batch-size", "4", "--steps", "3", "--gpu-vram", "16"]


def main() -> None:
    """Record and analyse."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.memprof"
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
            run(["profile", *MODEL, "--json", "--save", str(file)])
        run(["analyze", "--full", str(file), "--top", "6", "--replay", "--alloc-conf", "expandable_segments:True"])


if __name__ == "__main__":
    sys.exit(main())
