"""Programs in the idioms of public ones always run; the public ones do where MEMPROF_PROGRAMS names their folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.lanes import by_day
from tests.programs.fetched import PROGRAMS
from tests.programs.own_programs import OWN
from tests.programs.program import Result, run
from tests.scripts.running import memprof_run

HERE = Path(__file__).resolve().parent / "own"


def test_every_program_of_the_folder_is_listed():
    assert sorted(OWN) == sorted(path.stem for path in HERE.glob("*.py"))


@pytest.mark.parametrize("name", by_day(sorted(OWN), *sorted(OWN)[::4]))
def test_own(name, tmp_path):
    own = OWN[name]
    exit_code, report, stderr = memprof_run(*own.options, of=[str(HERE / f"{name}.py")], folder=tmp_path)
    result = Result(exit_code, report, stderr, 0.0)
    wrong = result.wrong(own)
    if own.known:
        assert wrong, f"{own.known} is mended: take the mark away"
        pytest.xfail(own.known)
    assert not wrong, stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name.replace(" ", "-"))
def test_public(program):
    folder = os.environ.get("MEMPROF_PROGRAMS")
    if not folder:
        pytest.skip("MEMPROF_PROGRAMS names no folder with checkouts of public programs")
    absent = program.missing(Path(folder))
    if absent:
        pytest.skip(absent)
    result = run(program, Path(folder))
    lacks = re.search(r"^ModuleNotFoundError: (No module .*)$", result.stderr, re.MULTILINE)
    if result.exit_code and lacks:
        pytest.skip(lacks[1])
    wrong = result.wrong(program)
    if program.known:
        assert wrong, f"{program.known} is mended: take the mark away"
        pytest.xfail(program.known)
    assert not wrong, result.stderr[-3000:]
