"""No verdict of the closed form's first line is one that the run behind a published figure would contradict."""

import pytest

from tests.benchmarks.first_line import read_runs

RUNS = read_runs()


@pytest.mark.parametrize("run", RUNS, ids=[f"{run.spec['model']}-{number}" for number, run in enumerate(RUNS)])
def test_a_verdict_of_the_first_line_holds(run):
    """`python -m tests.benchmarks.first_line --write` makes the runs, and says what is compared."""
    assert run.find_contradiction() == ""
