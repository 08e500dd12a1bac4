"""Prints the tables of docs/accuracy.md: published memory of plain PyTorch beside that of the virtual GPU.

Without an argument, operators: the workloads of tests/accuracy/baselines.py. With `training`, whole runs: those of
tests/accuracy/test_training_rows.py. The published figures are read from shared/published_memory.csv beside the
checkout. Without it nothing can be compared: exit code 4.
"""

from __future__ import annotations

import collections
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOT_HERE = 4


def _rows(rows: Iterable[Any]) -> None:
    print(f"{'workload':<27}{'size':>10}  {'card':<24}{'published':>12}{'simulated':>12}{'difference':>12}")
    for compared in rows:
        row = compared.row
        figures = f"{row.mib:>12,.3f}{compared.simulated:>12,.3f}{compared.simulated - row.mib:>+12.3f}"
        card = row.gpu if row.gpu.startswith("NVIDIA") else f"NVIDIA {row.gpu}"
        print(f"{row.kernel:<27}{f'{row.axis}={row.x}':>10}  {card:<24}{figures}")


def _summary(rows: Iterable[Any]) -> None:
    by_kernel = collections.defaultdict(list)
    for compared in rows:
        by_kernel[compared.row.kernel, compared.row.method].append(compared)
    print(f"{'workload':<27}{'method':<12}{'rows':>5}{'median':>11}{'worst':>11}  {'unexplained':>11}  {'unsplit':>11}")
    for (kernel, method), group in by_kernel.items():
        offs = [(c.simulated - c.row.mib) / c.row.mib if c.unexplained_bytes else 0.0 for c in group]
        missing, unsplit = (
            max(values) for values in zip(*((c.unexplained_bytes, c.unsplit_bytes) for c in group), strict=True)
        )
        figures = f"{len(group):>5}{statistics.median(offs):>+11.4%}{max(offs, key=abs):>+11.4%}"
        print(f"{kernel:<27}{method:<12}{figures}  {missing:>11,}  {unsplit:>11,}")


def main() -> None:
    """Simulate every row of a table and print it."""
    shared = ROOT.parent / "shared"
    if not (shared / "published_memory.csv").is_file():
        sys.exit(NOT_HERE)
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] == ["training"]:
        _training(shared)
    else:
        _operators(shared)


def _operators(shared: Path) -> None:
    from tests.accuracy import baselines

    everything = baselines.published(shared)
    rows = [baselines.compared(row) for row in everything if row.method in baselines.PREDICTED]
    _rows(rows)
    print("\nMiB.\n")
    _summary(rows)
    print("\nmedian, worst: of the published figure; a difference within its rounding counts as none.")
    print("unexplained, unsplit: bytes, the most of any row.\n")
    for method, reason in baselines.NOT_PREDICTED.items():
        kernels = collections.Counter(row.kernel for row in everything if row.method == method)
        listed = ", ".join(f"{kernel} {count}" for kernel, count in kernels.items())
        print(f"Not predicted: {method}, {sum(kernels.values())} rows ({listed}).\n  {reason}.")


def _training(shared: Path) -> None:
    from tests.accuracy import test_training_rows as comparison

    print(f"{'model':<29}{'what is added':<28}{'published':>10}{'simulated':>11}{'difference':>12}")
    for row in comparison.ROWS:
        gib, card = comparison.published(shared, row)
        simulated = comparison.simulate(row.run, card).peak_bytes / 2**30
        note = f"  {row.why}" if row.why else ""
        print(f"{row.model:<29}{row.method:<28}{gib:>10.4g}{simulated:>11.3f}{simulated / gib - 1:>+12.1%}{note}")
    print("\nGiB.")


if __name__ == "__main__":
    main()
