"""Compare what operators requested on the GPU with what they requested on the virtual one.

python -m tests.gpu.compare_operators REAL.jsonl VIRTUAL.jsonl [VIRTUAL.jsonl ...]

Prints a line for every operator that differs, and for each file how many are equal in bytes and order, equal in bytes,
different, failed on one side, or not recorded (on the CPU). A file that is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TURNS = ("first", "again")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file of tests.gpu.operators: its lines by operator."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["operator"]: line for line in lines}


def outcome(real: list[int] | None, virtual: list[int]) -> str:
    """Say how the requests of one call agree, lists of bytes; `real` is None on the CPU."""
    if real is None:
        return "not recorded"
    if real == virtual:
        return "equal"
    return "reordered" if Counter(real) == Counter(virtual) else "different"


def compare(real: dict[str, dict[str, Any]], virtual: dict[str, dict[str, Any]]) -> tuple[Counter[str], list[str]]:
    """Count the calls by how they agree, and describe each that does not in a line."""
    counts: Counter[str] = Counter()
    lines = []
    for name in real.keys() & virtual.keys():
        sides = real[name], virtual[name]
        errors = [side.get("error") for side in sides]
        if any(errors):
            counts["failed" if all(errors) else "failed on one side"] += 1
            lines.append(f"{name}: real {errors[0] or 'runs'}; virtual {errors[1] or 'runs'}")
            continue
        for turn in TURNS:
            found = outcome(*(side[turn] for side in sides))
            counts[found] += 1
            if found == "different":
                real_alone, virtual_alone = (
                    sorted((Counter(one[turn]) - Counter(other[turn])).elements())
                    for one, other in (sides, sides[::-1])
                )
                lines.append(f"{name}, {turn} call: real alone {real_alone}, virtual alone {virtual_alone}")
    counts["on one side alone"] = len(real.keys() ^ virtual.keys())
    return counts, sorted(lines)


def main() -> int:
    """Compare, and return the exit code: 1 if nothing was recorded on the GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("real", type=Path)
    parser.add_argument("virtual", type=Path, nargs="+")
    asked = parser.parse_args()
    if not asked.real.is_file():
        print(f"{asked.real} is not there: no operator was recorded on the GPU", file=sys.stderr)
        return 1
    real = read(asked.real)
    totals = []
    for path in asked.virtual:
        if path.is_file():
            counts, lines = compare(real, read(path))
            for line in lines:
                print(f"{path.stem}: {line}")
            totals.append(f"{path.stem}: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    print(*totals, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
