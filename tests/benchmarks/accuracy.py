"""Published memory figures beside simulated ones, row by row: the tables of docs/accuracy.md.

    python -m tests.benchmarks.accuracy [FILE.csv] [--write] [--only TEXT] [--processes N] [--offline]

FILE.csv: a table of published figures (tests/accuracy/published/rows.py has its columns); without it, that of
shared/published_memory.csv beside the checkout. Every row comes out again: predicted, or with the reason why not. With
--write the tables go to docs/accuracy.md, between its marks; else they are printed. Packages that a row's run needs and
that are not installed with this project are fetched by pip into .cache/accuracy/ (Triton is 190 MB), unless --offline.

Exit codes: 0; 1 the table cannot be read; 4 there is no table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.accuracy.published.prediction import Outcome
from tests.accuracy.published.rows import Row, TableError, read_rows

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT.parent / "shared" / "published_memory.csv"
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = (
    "<!-- published figures: python -m tests.benchmarks.accuracy --write -->",
    "<!-- end of published figures -->",
)
TRUTH = ("<!-- truth captures: python -m tests.benchmarks.accuracy --write -->", "<!-- end of truth captures -->")
NOT_HERE = 4


def sweep(rows: Sequence[Row], processes: int = 2) -> list[Outcome]:
    """Predict every row, in the order given. Sources that import other projects' packages run first, apart."""
    from tests.accuracy.published.sources import outcome, source_of

    # transformers' notices on building a model are about nobody's run.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found: dict[int, Outcome] = {}
    apart = [row for row in rows if source_of(row).isolated]
    together = [row for row in rows if not source_of(row).isolated]
    for group in (apart, together):
        if not group:
            continue
        # Spawned: torch's threads do not survive a fork.
        with ProcessPoolExecutor(min(processes, len(group)), mp_context=get_context("spawn")) as pool:
            for number, done in enumerate(pool.map(outcome, group), start=1):
                found[done.row.line] = done
                _progress(f"{number} of {len(group)}: {done.kind}, {done.row.title} ({done.seconds:.0f} s)")
    _progress("")
    return [found[row.line] for row in rows]


def fetch_libraries(rows: Iterable[Row]) -> None:
    """Get what rows of other projects' code need; what cannot be had is said, and those rows are not predicted."""
    from tests.accuracy import liger_kernels
    from tests.accuracy.published.libraries import TRITON, MissingLibraryError, fetch
    from tests.accuracy.published.operators import CCE

    notes = [(row.note, row.model) for row in rows if "Liger-Kernel" in row.source and row.method == "liger"]
    wanted = [("liger-kernel", release) for release in sorted(liger_kernels.releases(notes))]
    wanted += [CCE] if any("ml-cross-entropy" in row.source and row.method == "cce" for row in rows) else []
    for name, release in (TRITON, *wanted) if wanted else ():
        _progress(f"{name} {release}")
        try:
            fetch(name, release)
        except MissingLibraryError as missing:
            print(f"not here: {missing}", file=sys.stderr)


def with_tables(page: str, tables: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """`page` with what is between the marks replaced.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no {marks[0]}")
    return f"{before}{begin}\n{tables.rstrip()}\n{end}{after}"


def truth_captures() -> str:
    """What has been recorded on real cards, beside its simulation."""
    from tests.accuracy.cases import CASES
    from tests.accuracy.truth.compare import section

    return section(CASES)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Read the table, predict its rows, and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path, nargs="?", default=TABLE, metavar="FILE.csv")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/accuracy.md")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose source or model contains TEXT")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--offline", action="store_true", help="fetch no packages")
    asked = parser.parse_args()
    if not asked.table.is_file():
        print(f"no table of published figures: {asked.table}", file=sys.stderr)
        sys.exit(NOT_HERE)
    try:
        rows = [row for row in read_rows(asked.table) if asked.only in row.source or asked.only in row.model]
    except (TableError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    if not asked.offline:
        fetch_libraries(rows)
    from tests.accuracy.published.report import tables

    began = time.perf_counter()
    text = tables(sweep(rows, max(1, asked.processes)))
    if asked.write:
        page = with_tables(PAGE.read_text(encoding="utf-8"), text)
        PAGE.write_text(with_tables(page, truth_captures(), TRUTH), encoding="utf-8")
    else:
        print(text)
    print(f"{len(rows)} rows in {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
