"""Prints a table of docs/accuracy-tables.md: published memory of training runs beside that of the virtual GPU.

The runs are those of tests/accuracy/test_training_rows.py. The published figures are read from
shared/published_memory.csv beside the checkout. Without it, or without the libraries of the quantized rows (the
`quantization` extra has them), nothing can be compared: exit code 4.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_HERE = 4


def main() -> None:
    """Simulate every row and print it."""
    shared = ROOT.parent / "shared"
    if not (shared / "published_memory.csv").is_file():
        sys.exit(NOT_HERE)
    sys.path.insert(0, str(ROOT))
    _training(shared)


def _training(shared: Path) -> None:
    from tests.accuracy import test_training_rows as comparison

    needed = {package.partition(".")[0] for row in comparison.ROWS for package in comparison.needed(row.run)}
    if any(importlib.util.find_spec(package) is None for package in needed):
        sys.exit(NOT_HERE)
    print(f"{'model':<29}{'what is added':<28}{'published':>10}{'simulated':>11}{'difference':>12}")
    for row in comparison.ROWS:
        gib, gpu = comparison.published(shared, row)
        simulated = comparison.simulate(row.run, gpu).peak_bytes / 2**30
        note = f"  {row.why}" if row.why else ""
        print(f"{row.model:<29}{row.name:<28}{gib:>10.4g}{simulated:>11.3f}{simulated / gib - 1:>+12.1%}{note}")
    print("\nGiB.")


if __name__ == "__main__":
    main()
