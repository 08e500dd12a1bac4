"""Prints what the long tables of docs/ add up to; the pages that repeat a sum have it from here (docs/generate.py).

python docs/totals.py
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def rows(page: str, first_cell: str) -> list[list[str]]:
    """The cells of the table rows of a page that begin with a match of `first_cell`."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if re.match(rf"\| {first_cell} \|", line)]


def number(cell: str) -> int:
    """Of digits with commas."""
    return int(cell.replace(",", ""))


def show_recordings() -> None:
    """The two tables of docs/recordings.md: those that were at hand, and those that nobody had looked at."""
    table = rows("recordings.md", r"`[\w.]+` \| 2\.\d+")
    for name, part in (("at hand", table[:15]), ("unseen", table[15:]), ("all", table)):
        recorded, matched, extra = (sum(number(row[column]) for row in part) for column in (2, 3, 4))
        peaks, reserved = (sum(row[at] == row[at + 1] for row in part) for at in (5, 7))
        print(f"recordings {name}: {len(part)}")
        print(f"recordings {name}, matched: {matched:,} of {recorded:,} allocations")
        print(f"recordings {name}, too many: {extra}")
        print(f"recordings {name}, peaks equal: {peaks} of {len(part)}")
        print(f"recordings {name}, reserved equal: {reserved} of {len(part)}")
    off = sorted(number(row[8]) / number(row[7]) - 1 for row in table if row[7] != row[8])
    print("reserved off by:", ", ".join(f"{share:+.1%}" for share in off))


def show_programs() -> None:
    """The first table of docs/programs.md: the others have fewer columns."""
    table = [row for row in rows("programs.md", r"[^|`]+ \| [\w.-]+/[\w.-]+ \w+") if len(row) == 6]
    right = [row for row in table if row[3].startswith("fits")]
    told = sum(row[3].count(", ") for row in right)
    print(f"public programs: {len(table)}, as they should be: {len(right)}, wrong: {len(table) - len(right)}, ", end="")
    print(f"findings told: {told}")


def show_models() -> None:
    """The table of docs/accuracy-tables.md of models on the virtual GPU and the CPU."""
    table = rows("accuracy-tables.md", r"[\w-]+ \| [^|]+ \| [\d,]+ \| [\d,]+ \| yes")
    ways = [row for number, row in enumerate(table) if row[0] in [other[0] for other in table[:number]]]
    print(f"models against the CPU: {len(table) - len(ways)}, further ways: {len(ways)}")


if __name__ == "__main__":
    show_recordings()
    show_programs()
    show_models()
