"""Work that parts: every question is answered from where the ways part, in a process of its own."""

import os
import signal
import threading
from pathlib import Path

import pytest

from memprof.errors import MemprofError, UsageError
from memprof.workload.beginning import Beginning
from memprof.workload.side_by_side import side_by_side


def children() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


def squared(part):
    begun, been = os.getpid(), []
    number = part()
    been.append(number)  # of this question alone
    if number == 7:
        raise UsageError("no seven", value=number, hint="take another")
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2, begun, os.getpid(), been


@pytest.fixture
def beginning():
    before = children()
    found = Beginning(squared)
    yield found
    found.close()
    assert children() == before


def test_every_question_goes_on_from_the_same_point(beginning):
    one, two = beginning.ask(3), beginning.ask(4)
    assert (one[0], two[0]) == (9, 16) and (one[3], two[3]) == ([3], [4])
    assert one[1] == two[1] and len({os.getpid(), one[1], one[2], two[2]}) == 4


def test_errors_come_back_and_the_dead_have_no_answer(beginning):
    error = beginning.ask(7)
    assert isinstance(error, UsageError) and (error.problem, error.value, error.hint) == ("no seven", 7, "take another")
    assert beginning.ask(8) is None
    assert beginning.ask(2)[0] == 4


def test_processes_that_were_forked_later_may_ask(beginning, monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    answers = side_by_side([lambda number=number: beginning.ask(number)[:2] for number in range(4)])
    assert [answer[0] for answer in answers] == [0, 1, 4, 9] and len({answer[1] for answer in answers}) == 1


def test_an_error_on_the_way_is_the_answer_to_all():
    def fails(part):
        raise MemprofError("cannot begin")

    beginning = Beginning(fails)
    assert [str(beginning.ask(number)) for number in (1, 2)] == ["cannot begin"] * 2
    beginning.close()


def test_what_was_left_in_order_is_left_when_it_is_over(tmp_path):
    def tidy(part):
        mark = tmp_path / "begun"
        mark.touch()
        here = os.getpid()
        try:
            return part()
        finally:
            if os.getpid() == here:
                mark.unlink()

    beginning = Beginning(tidy)
    assert beginning.ask(1) == 1 and (tmp_path / "begun").exists()
    beginning.close()
    assert not (tmp_path / "begun").exists()
    assert beginning.ask(1) is None
