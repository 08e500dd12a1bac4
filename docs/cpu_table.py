"""Writes the table of docs/accuracy-tables.md that compares the virtual GPU with the CPU's own events (about a minute).

The models, ways to train and the comparison are those of tests/accuracy/test_against_cpu.py, whose tests check too that
every row of the table is current.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "accuracy-tables.md"
_TABLE = re.compile(
    r"(?P<begin><!-- table of: python docs/cpu_table.py -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL
)
_HEAD = (
    "| model | family, or way to train | allocations | frees | equal | CPU temporaries left out |",
    "| --- | --- | ---: | ---: | --- | --- |",
)


def main() -> None:
    """Run every comparison and write the table."""
    sys.path.insert(0, str(ROOT))
    from tests.accuracy import test_against_cpu as comparison

    rows = [
        comparison.row(name, model.family, comparison.compare_model(name)) for name, model in comparison.MODELS.items()
    ]
    rows += [comparison.row(*comparison.way_of(name), comparison.compare_way(name)) for name in comparison.WAYS]
    table = "\n".join([*_HEAD, *rows])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda found: f"{found['begin']}{table}\n{found['end']}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
