"""What commands answer in JSON is what they answered before the package was laid out anew (commit 47a6224).

`MEMPROF_BLESS=1 pytest tests/golden --lane nightly` writes the files anew; read the difference before you commit it.
"""

import json
import os
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
    before = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    now = answer(name, run)
    if os.environ.get("MEMPROF_BLESS"):
        write(name, now)
    assert now == before
