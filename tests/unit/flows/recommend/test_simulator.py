"""Runs of a search at once: what it finds, counts and says is what it would have in one process."""

import os
from typing import NamedTuple

import pytest

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError, UsageError
from memprof.flows.recommend.largest_models import recommend_largest_models
from memprof.flows.recommend.simulator import Simulator
from memprof.spec import TargetSpec

BASE = TargetSpec(model="gpt2", context_length=16)


class Outcome(NamedTuple):
    batch_size: int
    process: int


def _run(self, spec, micro_batches):
    if spec.batch_size == 7:
        raise UsageError("seven sequences", value=7)
    return Outcome(spec.batch_size, os.getpid())


@pytest.fixture(params=["1", "2"])
def runs(request, monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", request.param)
    monkeypatch.setattr(Simulator, "_run", _run)
    found = Simulator(find_gpu("rtx-4090"), lambda doing: None)
    found.processes = int(request.param)
    return found


def spec(batch_size: int) -> TargetSpec:
    return BASE.edit(batch_size=batch_size)


def test_what_is_made_at_once_counts_when_it_is_asked_for(runs):
    runs.run_in_parallel((spec(size), 1) for size in (1, 2, 7, 2))
    assert len(runs) == 0 and not runs.error_by_label
    first = runs.run(spec(1), "one")
    assert (first.process != os.getpid()) is (runs.processes == 2)
    assert len(runs) == 1 and runs.run(spec(1), "again") is first and len(runs) == 1
    with pytest.raises(MemprofError, match="seven"):
        runs.run(spec(7), "seven")
    assert runs.try_run(spec(7), "seven again") is None and runs.error_by_label == {
        "seven again": "seven sequences (7)"
    }
    assert runs.run(spec(3), "not made").process == os.getpid() and len(runs) == 2


def test_searches_share_what_is_known_and_what_they_find(runs):
    runs.run(spec(1), "before")

    def search(*sizes):
        def work():
            outcomes = [runs.try_run(spec(size), f"size {size}") for size in sizes]
            return [outcome and outcome.batch_size for outcome in outcomes], os.getpid()

        return work

    (one, first), (two, _) = runs.run_searches([search(1, 2, 7), search(2, 3)], "numbers")
    assert one == [1, 2, None] and two == [2, 3]
    assert (first != os.getpid()) is (runs.processes == 2)
    assert len(runs) == 3 and runs.error_by_label == {"size 7": "seven sequences (7)"}
    assert isinstance(runs.last_error, UsageError)
    here = runs.run(spec(3), "known")
    assert here.batch_size == 3 and len(runs) == 3


def test_the_first_error_is_raised(runs):
    def fails():
        return runs.run(spec(7), "seven")

    with pytest.raises(UsageError, match="seven"):
        runs.run_searches([lambda: 1, fails], "numbers")


@pytest.mark.nightly
def test_the_answer_does_not_depend_on_the_number_of_processes(monkeypatch):
    answers = []
    for number in ("1", "3"):
        monkeypatch.setenv("MEMPROF_PROCESSES", number)
        answers.append(
            recommend_largest_models(TargetSpec(model="gpt2", gpu_vram_bytes=1 << 30), lambda doing: None).to_json()
        )
    assert answers[0] == answers[1]
