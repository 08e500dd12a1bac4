"""Prints what docs/vocab.md shows: the synthetic corpus of case study 2, as large as WikiText-2, and Pythia-70M.

python docs/vocab_example.py
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from itertools import islice
from pathlib import Path

from memprof.cli.main import run

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "2-pythia-vocabulary"
MODEL = [
    "--model", "pythia-70m", "--dtype", "float32", "--batch-size", "32", "--context-length", "128",
    "--gpu", "a100-80gb",
]  # fmt: skip


def main() -> int:
    """Write the corpus and count it."""
    sys.path.insert(0, str(RECIPE))
    from vocabulary import synthetic_corpus

    # The folder's name is another each time, and must not be in what is printed.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        words = synthetic_corpus()
        with Path("corpus.txt").open("w", encoding="utf-8") as file:
            while line := list(islice(words, 100)):
                file.write(" ".join(line) + "\n")
        try:
            run(["vocab", "corpus.txt", "--cap", "9999", *MODEL])
        except SystemExit as done:
            return int(done.code or 0)
    return 2


if __name__ == "__main__":
    sys.exit(main())
