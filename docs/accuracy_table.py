"""Prints the tables of docs/accuracy.md: published peaks beside those of the virtual GPU.

Without an argument, operators: the workloads of tests/accuracy/test_liger.py. With `training`, whole runs: those of
tests/accuracy/test_training_rows.py. The published figures are read from shared/published_memory.csv beside the
checkout. Without it nothing can be compared: exit code 4.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
NOT_HERE = 4


def _comparison(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "accuracy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Simulate every row of a table and print it."""
    shared = ROOT.parent / "shared"
    if not (shared / "published_memory.csv").is_file():
        sys.exit(NOT_HERE)
    if sys.argv[1:] == ["training"]:
        _training(shared)
    else:
        _operators(shared)


def _operators(shared: Path) -> None:
    comparison = _comparison("test_liger")
    worst = 0.0
    count = 0
    print(f"{'workload':<28}{'size':>10}  {'card':<24}{'published':>12}{'simulated':>12}{'difference':>12}")
    for setup, axis in comparison.CASES:
        for row in comparison.published(shared, setup.__name__, axis):
            simulated = comparison.simulated_mib(row, setup)
            difference = simulated - row.mib
            worst = max(worst, abs(difference) / row.mib)
            count += 1
            size = f"{row.axis}={row.x}"
            figures = f"{row.mib:>12,.3f}{simulated:>12,.3f}{difference:>+12.3f}"
            print(f"{row.kernel:<28}{size:>10}  {row.gpu:<24}{figures}")
    print(f"\nMiB. {count} rows; the largest difference is {worst:.5%} of the published figure.")


def _training(shared: Path) -> None:
    comparison = _comparison("test_training_rows")
    print(f"{'model':<29}{'what is added':<28}{'published':>10}{'simulated':>11}{'difference':>12}")
    for row in comparison.ROWS:
        gib, card = comparison.published(shared, row)
        simulated = comparison.simulate(row.run, card).peak_bytes / 2**30
        note = f"  {row.why}" if row.why else ""
        print(f"{row.model:<29}{row.method:<28}{gib:>10.4g}{simulated:>11.3f}{simulated / gib - 1:>+12.1%}{note}")
    print("\nGiB.")


if __name__ == "__main__":
    main()
