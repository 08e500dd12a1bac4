"""What the search says of a set is so: what is given up with it, and that nothing milder fits."""

from __future__ import annotations

import functools
import json
import re

import pytest

from memprof.errors import MemprofError
from memprof.flows.ahead import Ahead, _EnoughError, _UntilCompiled
from memprof.flows.ladder.climb import climb
from memprof.flows.ladder.runs import AskedError, Guess, SpecRuns
from memprof.flows.ladder.search import guessed, search
from memprof.flows.profile import profile
from memprof.remedies.fixes import Fix
from memprof.remedy_catalog import REMEDIES
from memprof.spec import TargetSpec

SPEC = TargetSpec(model="1M", model_is_size=True, batch_size=4, context_length=2048, gpu_vram_bytes=640 << 20)
SETS = (
    ("the same numbers", ("optimizer-in-backward", "micro-batch")),
    ("the optimizer elsewhere", ("micro-batch", "cpu-offload-optimizer")),
)


@pytest.mark.slow
def test_of_two_that_do_not_go_together_the_second_may_be_the_one_that_fits():
    _, document = search(SpecRuns(SPEC), SETS)
    assert document.verdict.fits and document.ladder[-1].remedies == ("micro-batch",)
    assert document.ladder_reason == "micro-batch is enough (the same numbers)"
    assert document.ladder_left_out["optimizer-in-backward"].startswith("does not go with micro-batch: ")


@pytest.mark.slow
def test_the_next_rung_is_run_with_the_one_before_it(monkeypatch):
    """What is guessed changes no answer, and is what is asked for next."""
    spec = TargetSpec(model="pythia-70m", context_length=2048, gpu_vram_bytes=2 << 30)
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        runs = SpecRuns(spec)
        _, document = climb(runs, ["activation-checkpointing", "chunked-loss"])
        assert [rung.added for rung in document.ladder] == [None, "chunked-loss", "activation-checkpointing"]
        assert document.ledger is not None and not runs._ahead._made
        answers.append(document.to_json())
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_what_a_search_begins_with_is_run_beside_the_original(monkeypatch):
    spec = TargetSpec(model="pythia-70m", context_length=2048, gpu_vram_bytes=2 << 30)
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        runs = SpecRuns(spec, guess=functools.partial(guessed, spec))
        # Of two sets, of which the larger does not apply as a whole.
        made = set(runs._ahead._made)
        assert len(made) == (0 if processes == "1" else 2)
        _, document = search(runs)
        assert document.verdict.fits and document.ledger is not None and not made & set(runs._ahead._made)
        answers.append(document.to_json())
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_climb_begins_elsewhere_while_the_compiler_is_imported(monkeypatch):
    spec = TargetSpec(model="pythia-70m", context_length=2048, gpu_vram_bytes=2 << 30)
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        here = []

        def run(spec, *args, here=here, **options):
            here.append(spec.fixes)
            return profile(spec, *args, **options)

        monkeypatch.setattr("memprof.flows.ladder.runs.profile", run)
        runs = SpecRuns(spec, climbs=True)
        assert here == ([()] if processes == "1" else [])
        _, document = climb(runs, ["chunked-loss"])
        assert not runs._ahead._made and not runs._ahead.has_compiled
        answers.append(document.to_json())
    assert answers[0] == answers[1]


def test_what_compiles_waits_for_the_first_that_does(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    spec = TargetSpec(model="pythia-70m", context_length=256)
    ahead, both = Ahead(lambda doing: None), [spec, spec.edit(fixes=("compile",))]
    monkeypatch.setattr("memprof.workload.side_by_side.side_by_side", lambda works, progress: [None] * len(works))
    ahead.run(both)
    assert not ahead._made
    ahead.has_compiled = True
    ahead.run(both)
    assert set(ahead._made) == set(both)


@pytest.mark.slow
def test_what_compiles_is_run_beside_what_is_tried_before_it(monkeypatch):
    pytest.importorskip("triton", reason="Inductor writes no kernels for a card without it")
    spec = TargetSpec(model="pythia-70m", batch_size=8, context_length=1024, vocab_size=512)
    answers, here = [], []

    def run(spec, *args, **options):
        here.append(spec.fixes)
        return profile(spec, *args, **options)

    monkeypatch.setattr("memprof.flows.ladder.runs.profile", run)
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        here.clear()
        runs = SpecRuns(spec, climbs=True)
        _, document = climb(runs, ["sdpa-attention", "compile"])
        assert [rung.added for rung in document.ladder] == [None, "compile"]
        # What was made was all asked for, and all that was asked for was made.
        assert here == ([(), ("sdpa-attention",), ("compile",)] if processes == "1" else [])
        assert not runs._ahead._made and runs._ahead.has_compiled
        answers.append(re.sub(r"took [\d.]+ s|\"compile_seconds\": [\d.]+", "", json.dumps(document.to_json())))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("over", [False, True])
def test_others_are_asked_for_until_one_compiles_or_the_other_run_is_made(over, monkeypatch):
    monkeypatch.setattr("memprof.flows.ahead.profile", lambda spec, **options: (spec, None))
    spec, is_over = TargetSpec(model="pythia-70m"), []
    asked = _UntilCompiled(lambda: bool(is_over))
    asked.take(spec)
    asked.take(spec.edit(batch_size=2))
    if over:
        is_over.append(over)
    with pytest.raises(_EnoughError):
        asked.take(spec.edit(batch_size=3) if over else spec.edit(fixes=("compile",)))
    assert list(asked.made) == [spec, spec.edit(batch_size=2)]


def test_one_that_compiles_and_fails_beside_the_others_fails_when_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    spec = TargetSpec(model="pythia-70m", context_length=256)
    compiled = spec.edit(fixes=("compile", "low-rank-npt"))
    ahead = Ahead(lambda doing: None)
    ahead.beside(compiled, lambda asked: asked.take(spec))
    assert not ahead.has_compiled
    trace, document = ahead.take(spec)
    assert trace.events and document.ledger is None
    with pytest.raises(MemprofError, match="low-rank-npt"):
        ahead.take(compiled)


def test_an_original_that_fails_elsewhere_fails_here(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    with pytest.raises(MemprofError, match="PEFT cannot adapt"):
        SpecRuns(TargetSpec(model="pythia-70m", adapter="lora", lora_targets="no_such"), climbs=True)


def test_what_depends_on_the_original_is_not_guessed():
    with pytest.raises(AskedError):
        Guess(SPEC).check([Fix(REMEDIES["bfloat16"])])  # of which dtype it is
