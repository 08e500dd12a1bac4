"""The totals of what commands answer in JSON are those of the saved answers, which `test_brief.py` and others show.

`MEMPROF_BLESS=1 pytest tests/golden --lane nightly` writes the files anew; read the difference before you commit it.
"""

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.golden.commands import COMMANDS, KEPT, answer, write
from tests.lanes import by_day
from tests.processes import python

TAKEN_WITH = {"torch": "2.13.0", "transformers": "5.23.0"}


def run(arguments, folder):
    return python(*arguments, folder=Path(folder))[:3]


# A run that dies is in test_report.py as well; the others are `profile` with one option more.
AT_NIGHT = {"profile-does-not-fit", "profile-ladder", "profile-lora"}


@pytest.mark.parametrize("name", by_day(COMMANDS, *(name for name in COMMANDS if name not in AT_NIGHT)))
def test_json_is_as_before(name):
    for package, taken in TAKEN_WITH.items():
        if version(package).partition("+")[0] != taken:
            pytest.skip(f"the files were taken with {package} {taken}, and {version(package)} is installed")
    before, now = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8")), answer(name, run)
    wanted, made = dict(totals(before)), dict(totals(now))
    changes = [f"{path}: {size} -> {made.get(path)}" for path, size in wanted.items() if made.get(path) != size]
    if changes and os.environ.get("MEMPROF_BLESS"):
        write(name, now)
    assert not changes, f"look, then bless it with MEMPROF_BLESS=1: {'; '.join(changes)}"


# What these tables hold is what unit tests are for.
TABLES = {
    "blocks", "evidence", "free_segments", "groups", "over_time", "pools", "rows", "segments", "stages", "steps",
    "suggestions", "tensors", "timeline",
}  # fmt: skip


def totals(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of bytes, verdicts and ids of findings in an answer, without those of tables."""
    if isinstance(value, dict):
        for key in value.keys() - TABLES:
            yield from totals(value[key], f"{path}/{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from totals(item, f"{path}/{number}")
    elif path.endswith(("bytes", "fits", "/id")) or path.startswith("/peak/categories/"):
        yield path, value


def test_a_total_that_changes_is_seen() -> None:
    before = {"peak": {"allocated_bytes": 5, "tensors": [{"bytes": 3}]}, "findings": [{"id": "a", "title": "b"}]}
    assert dict(totals(before)) == {"/peak/allocated_bytes": 5, "/findings/0/id": "a"}
