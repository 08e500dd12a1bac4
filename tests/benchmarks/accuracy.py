"""Published memory figures beside simulated ones, row by row: the tables of docs/accuracy-tables.md.

    python -m tests.benchmarks.accuracy [FILE.csv] [--write] [--only TEXT] [--processes N] [--offline] [--keep FILE]

FILE.csv: a table of published figures (tests/accuracy/published/rows.py has its columns); without it, that of
shared/published_memory.csv beside the checkout. Every row comes out again: predicted, or with the reason why not. With
--write the tables go to docs/accuracy-tables.md, between its marks; else they are printed. Unless --offline, what is
not here is fetched into .cache/accuracy/: packages that a row's run needs, by pip (Triton is 190 MB), and the sources'
own code, by git. --keep FILE: predictions are added to FILE as they are done, and those in it are not computed again,
so that a sweep can be run in parts.

Exit codes: 0; 1 the table cannot be read; 4 there is no table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.accuracy.published.prediction import Outcome, Prediction
from tests.accuracy.published.rows import Row, TableError, read_rows

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT.parent / "shared" / "published_memory.csv"
PAGE = ROOT / "docs" / "accuracy-tables.md"
BEGIN, END = (
    "<!-- published figures: python -m tests.benchmarks.accuracy --write -->",
    "<!-- end of published figures -->",
)
TRUTH = ("<!-- truth captures: python -m tests.benchmarks.accuracy --write -->", "<!-- end of truth captures -->")
NOT_HERE = 4


def sweep(rows: Sequence[Row], processes: int = 2, keep: Path | None = None) -> list[Outcome]:
    """Predict every row, in the order given; `keep` is a file of predictions, read first and added to. Sources that
    import other projects' packages run first, apart."""
    from tests.accuracy.published.sources import outcomes, source_of

    # transformers' notices on building a model are about nobody's run.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = _kept(rows, keep)
    left = [row for row in rows if row.line not in found]
    for apart in (True, False):
        # Rows of one run stay together: it is run once.
        groups = [
            list(group)
            for _, group in itertools.groupby(
                (row for row in left if source_of(row).isolated is apart), key=lambda row: row.run
            )
        ]
        if not groups:
            continue
        # Spawned: torch's threads do not survive a fork.
        with ProcessPoolExecutor(min(processes, len(groups)), mp_context=get_context("spawn")) as pool:
            for number, finished in enumerate(pool.map(outcomes, groups), start=1):
                for done in finished:
                    found[done.row.line] = done
                    _progress(f"{number} of {len(groups)}: {done.kind}, {done.row.title} ({done.seconds:.0f} s)")
                    if keep is not None:
                        with keep.open("a", encoding="utf-8") as file:
                            file.write(json.dumps([dataclasses.astuple(done.row), vars(done.prediction)]) + "\n")
    _progress("")
    return [found[row.line] for row in rows]


def _kept(rows: Sequence[Row], keep: Path | None) -> dict[int, Outcome]:
    from tests.accuracy.published.sources import source_of

    found = {}
    if keep is not None and keep.is_file():
        by_cells = {dataclasses.astuple(row): row for row in rows}
        for cells, prediction in map(json.loads, keep.read_text(encoding="utf-8").splitlines()):
            row = by_cells.get(tuple(cells))
            if row is not None:
                found[row.line] = Outcome(row, Prediction(**prediction), kind=source_of(row).name)
    return found


def fetch_libraries(rows: Sequence[Row]) -> None:
    """Get what rows of other projects' code need; what cannot be had is said, and those rows are not predicted."""
    from tests.accuracy import liger_kernels
    from tests.accuracy.published.libraries import TRITON, fetch
    from tests.accuracy.published.operators import CCE
    from tests.accuracy.published.sources import source_of

    notes = [(row.note, row.model) for row in rows if "Liger-Kernel" in row.source and row.method == "liger"]
    wanted = [("liger-kernel", release) for release in sorted(liger_kernels.releases(notes))]
    wanted += [CCE] if any("ml-cross-entropy" in row.source and row.method == "cce" for row in rows) else []
    for name, release in (TRITON, *wanted) if wanted else ():
        _fetched(f"{name} {release}", functools.partial(fetch, name, release))
    for checkout in {source_of(row).code: None for row in rows}:
        if checkout is not None:
            _fetched(checkout.title, checkout.fetch)


def _fetched(name: str, fetch: Callable[[], None]) -> None:
    from tests.accuracy.published.libraries import MissingLibraryError

    _progress(name)
    try:
        fetch()
    except MissingLibraryError as missing:
        print(f"not here: {missing}", file=sys.stderr)


def with_tables(page: str, tables: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """`page` with what is between the marks replaced; ValueError if it has none."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no {marks[0]}")
    return f"{before}{begin}\n{tables.rstrip()}\n{end}{after}"


def truth_captures() -> str:
    """What has been recorded on real GPUs, beside its simulation."""
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
    parser.add_argument("--write", action="store_true", help="put the tables into docs/accuracy-tables.md")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose source or model contains TEXT")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--offline", action="store_true", help="fetch no packages and no code")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="predictions are added to FILE, and taken from it")
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
    text = tables(sweep(rows, max(1, asked.processes), asked.keep))
    if asked.write:
        page = with_tables(PAGE.read_text(encoding="utf-8"), text)
        PAGE.write_text(with_tables(page, truth_captures(), TRUTH), encoding="utf-8")
    else:
        print(text)
    print(f"{len(rows)} rows in {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
