"""Programs whose verdict is known by construction are told it, by a plain run; a few of them in `make test`.

Beside this file, test_claims.py runs each to its end, whether it does what it claims: two files, for two workers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from tests.lanes import by_day
from tests.planted.planted import Planted, Told, is_near, programs, read, run, wrong

PROGRAMS = programs()


@pytest.mark.parametrize("name", by_day(PROGRAMS, *list(PROGRAMS)[::24]))
def test_verdict(name, tmp_path):
    told = run(PROGRAMS[name], folder=tmp_path)
    assert not wrong(PROGRAMS[name], told), told.stderr[-2000:]


def test_families():
    families = Counter(program.path.parent.name for program in PROGRAMS.values())
    assert sum(families.values()) >= 100
    assert min(families.values()) >= 5, "a program alone shows little: five of a kind"


LEAK = Planted(
    path=Path("leak.py"),
    fits=False,
    exit_code=3,
    step=20,
    grows_bytes=64 << 20,
    options=(),
    ends=True,
    culprit="leak.py:7",
    known=False,
)
GROWTH = {"bytes_per_step": 64 << 20, "steps_seen": 8, "program_steps": 60, "runs_out_step": 20}
FINDING = {
    "id": "memory-growth",
    "severity": "warning",
    "title": "kept by list `outputs` (leak.py:7)",
    "evidence": [],
}


def told(*, exit_code=3, fits=False, growth=GROWTH, findings=(FINDING,)):
    return Told(exit_code, {"verdict": {"fits": fits, "growth": growth}, "findings": findings, "failure": None}, "")


def test_what_is_right_is_not_wrong():
    assert not wrong(LEAK, told())


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (told(exit_code=0), "exit code 0"),
        (told(fits=True), "fits: True"),
        (told(fits=None), "fits: None"),
        (told(growth={**GROWTH, "runs_out_step": None}), "in step None"),
        (told(growth={**GROWTH, "runs_out_step": 17}), "in step 17"),
        (told(growth={**GROWTH, "bytes_per_step": 71 << 20}), "grows by"),
        (told(findings=()), "not first"),
        (told(findings=({**FINDING, "title": "kept by list `outputs` (leak.py:70)"},)), "not first"),
        (Told(3, {}, ""), "no report"),
    ],
)
def test_what_is_wrong_is_seen(answer, complaint):
    assert any(complaint in line for line in wrong(LEAK, answer))


def test_a_line_that_is_known_not_to_be_named():
    known = dataclasses.replace(LEAK, known=True)
    assert not wrong(known, told(findings=()))
    assert wrong(known, told()) == ["leak.py:7 is named"]


def test_growth_where_there_is_none():
    steady = dataclasses.replace(LEAK, fits=True, exit_code=0, step=None, grows_bytes=None, culprit=None)
    answer = told(exit_code=0, fits=True, growth=None)
    assert wrong(steady, answer) == [f"also told: {FINDING['title']}", "memory that does not grow is said to"]


def test_another_line_beside_the_right_one() -> None:
    other = {**FINDING, "id": "idle-memory", "title": "`noise` (leak.py:3) is unused"}
    assert wrong(LEAK, told(findings=(FINDING, other))) == ["also told: `noise` (leak.py:3) is unused"]
    assert not wrong(LEAK, told(findings=(FINDING, {**other, "severity": "note"})))
    assert not wrong(LEAK, told(findings=(FINDING, {**other, "title": "gradients are unused"})))


@pytest.mark.parametrize(
    ("step", "right", "near"), [(18, 20, True), (17, 20, False), (105, 100, True), (106, 100, False)]
)
def test_near(step, right, near):
    assert is_near(step, right) is near


@pytest.mark.parametrize(
    "text",
    ["# fits: yes\n# exit: 0\n", "# fits: yes\n# exit: 0\n# why: so\n# verdict: 1\n", "# fits: yes\n# why: so\n"],
    ids=["no reason", "an unknown key", "no exit code"],
)
def test_a_header_that_is_not_understood(text, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"program\.py"):
        read(path)


def test_two_culprits(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("# fits: yes\n# exit: 0\n# why: so\n" + "x = 1  # <- culprit\n" * 2)
    with pytest.raises(ValueError, match="2 culprits"):
        read(path)
