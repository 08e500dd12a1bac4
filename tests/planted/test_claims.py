"""The programs do what they claim, in a run to their own end; a plain run, which stops, is in test_planted.py."""

from __future__ import annotations

import pytest

from tests.planted.planted import programs, run, wrong

PROGRAMS = {name: program for name, program in programs().items() if program.ends}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_claim(name, tmp_path):
    told = run(PROGRAMS[name], "--until-exit", folder=tmp_path)
    assert not wrong(PROGRAMS[name], told), told.stderr[-2000:]
