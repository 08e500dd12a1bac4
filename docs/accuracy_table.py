"""Prints the tables of docs/accuracy.md: published memory of plain PyTorch operators beside that of the virtual GPU.

The workloads are those of tests/accuracy/baselines.py; the published figures are read from shared/published_memory.csv
beside the checkout. Without it nothing can be compared: exit code 4.
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
BAR = 1e-3
"""A relative difference above this is explained in bytes."""


def _rows(rows: Iterable[Any]) -> None:
    print(
        f"{'workload':<27}{'size':>10}  {'card':<24}{'published':>12}{'simulated':>12}{'difference':>12}{'unsplit':>9}"
    )
    for compared in rows:
        row = compared.row
        figures = f"{row.mib:>12,.3f}{compared.simulated:>12,.3f}{compared.simulated - row.mib:>+12.3f}"
        card = row.gpu if row.gpu.startswith("NVIDIA") else f"NVIDIA {row.gpu}"
        print(f"{row.kernel:<27}{f'{row.axis}={row.x}':>10}  {card:<24}{figures}{compared.unsplit:>9.3f}")


def _summary(rows: Iterable[Any]) -> None:
    by_kernel = collections.defaultdict(list)
    for compared in rows:
        by_kernel[compared.row.kernel, compared.row.method].append(compared)
    print(
        f"{'workload':<27}{'method':<14}{'rows':>5}{'median':>11}{'worst':>11}  {'unexplained, bytes':<20}above 0.1 %"
    )
    for (kernel, method), group in by_kernel.items():
        offs = [0.0 if compared.is_rounding else compared.off for compared in group]
        worst = max(offs, key=abs)
        missing = max(round(compared.unexplained * 2**20) for compared in group)
        misses = [c for c, off in zip(group, offs, strict=True) if abs(off) > BAR]
        why = "; ".join(f"{c.row.axis}={c.row.x}: {round(c.unsplit * 2**20):,} bytes not split off" for c in misses)
        figures = f"{len(group):>5}{statistics.median(offs):>+11.4%}{worst:>+11.4%}"
        print(f"{kernel:<27}{method:<14}{figures}  {missing:<20,}{why or 'none'}")


def main() -> None:
    """Simulate every row and print it."""
    shared = ROOT.parent / "shared"
    if not (shared / "published_memory.csv").is_file():
        sys.exit(NOT_HERE)
    sys.path.insert(0, str(ROOT))
    from tests.accuracy import baselines

    everything = baselines.published(shared)
    rows = [baselines.compared(row) for row in everything if row.method in baselines.PREDICTED]
    _rows(rows)
    print("\nMiB. unsplit: what the allocator does not split off the blocks at the peak.\n")
    _summary(rows)
    print("\nOf the published figure; a difference within its rounding counts as none.\n")
    for method, reason in baselines.NOT_PREDICTED.items():
        kernels = collections.Counter(row.kernel for row in everything if row.method == method)
        listed = ", ".join(f"{kernel} {count}" for kernel, count in kernels.items())
        print(f"Not predicted: {method}, {sum(kernels.values())} rows ({listed}).\n  {reason}.")


if __name__ == "__main__":
    main()
