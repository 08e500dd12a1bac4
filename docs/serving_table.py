"""Prints the tables of docs/serving.md: start-up logs of inference engines beside the closed form.

python docs/serving_table.py             # the sums
python docs/serving_table.py rows        # each row
python docs/serving_table.py later       # the sums of the logs that were found after the rules were made

The logs are read from shared/serving.csv beside the checkout, and without it nothing can be compared: exit code 4.
Those that were found later are in tests/accuracy/published_starts.toml.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_HERE = 4
KINDS = ("weights", "profile peak", "KV cache", "tokens", "layout")


def main() -> None:
    """Compare the rows, and print what was asked for."""
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] == ["later"]:
        from tests.accuracy.published_starts import compare_starts

        # Of the rows that are off, the cause is likely and not verified: they count.
        _print_sums([dataclasses.replace(row, is_exclusive=True) for row in compare_starts()])
        return
    shared = ROOT.parent / "shared"
    if not (shared / "serving.csv").is_file():
        sys.exit(NOT_HERE)
    from tests.accuracy.serving_rows import compare_rows

    rows = list(compare_rows(shared))
    if sys.argv[1:] == ["rows"]:
        _print_rows(rows)
    else:
        _print_sums(rows)


def _print_sums(rows: list) -> None:
    from tests.accuracy.serving_rows import summarize

    print(f"{'figure':<34}{'logs':>5}{'median':>9}{'90th percentile':>18}")
    labels = {"layout": "tokens, given the KV cache"}
    for kind in KINDS:
        count, median, high = summarize(rows, kind, exclusive=kind != "layout")
        print(f"{labels.get(kind, kind):<34}{count:>5}{median:>9.1%}{high:>18.1%}")
    banded = [row.is_in_band for row in rows if row.is_in_band is not None and row.is_exclusive]
    print(f"{'tokens within the stated band':<34}{len(banded):>5}{sum(banded) / max(len(banded), 1):>9.0%}")
    judged = [row for row in rows if row.starts is not None and row.is_exclusive]
    right = sum(row.starts is row.started for row in judged)
    print(f"{'starts or refuses, told right':<34}{len(judged):>5}{right / len(judged):>9.0%}")
    skipped = [row for row in rows if row.skipped]
    print(f"{'not compared':<34}{len(skipped):>5}")


def _print_rows(rows: list) -> None:
    heads = {"profile peak": "peak", "KV cache": "KV", "layout": "given KV"}
    print(f"{'log':<6}{'release':<10}{'model':<34}{'GPU':<18}", *(f"{heads.get(kind, kind):>8}" for kind in KINDS))
    for row in rows:
        name = row.model.rpartition("/")[2][:32]
        gpu = f"{row.tensor_parallel} x {row.gpu}"[:17]
        start = f"{row.key:<6}{row.version[:9]:<10}{name:<34}{gpu:<18}"
        if row.skipped:
            print(f"{start} not compared: {row.skipped}")
            continue
        errors = {figure.kind: f"{figure.error:+.1%}" for figure in row.figures}
        shared = "" if row.is_exclusive else "  memory shared with other programs"
        print(start, *(f"{errors.get(kind, ''):>8}" for kind in KINDS), shared)


if __name__ == "__main__":
    main()
