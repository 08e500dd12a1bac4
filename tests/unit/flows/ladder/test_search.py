"""What the search says of a set is so: what is given up with it, and that nothing milder fits."""

from __future__ import annotations

import pytest

from memprof.errors import MemprofError
from memprof.flows.ladder.climb import climb
from memprof.flows.ladder.runs import SpecRuns
from memprof.flows.ladder.search import search
from memprof.flows.profile import profile
from memprof.remedies.catalog import REMEDIES
from memprof.remedies.fixes import Fix
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
def test_what_is_made_at_once_is_what_would_be_made_in_turn(monkeypatch):
    spec = TargetSpec(model="pythia-70m", context_length=2048, gpu_vram_bytes=2 << 30)
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        runs = SpecRuns(spec)
        runs.make([[Fix(REMEDIES["chunked-loss"])], [Fix(REMEDIES["activation-checkpointing"])]])
        assert len(runs._ready) == (0 if processes == "1" else 2)
        _, document = climb(runs, ["activation-checkpointing", "chunked-loss"])
        assert [rung.added for rung in document.ladder] == [None, "chunked-loss", "activation-checkpointing"]
        answers.append(document.to_json())
    assert answers[0] == answers[1]


def test_what_cannot_be_made_says_so_when_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    runs = SpecRuns(TargetSpec(model="pythia-70m", context_length=64))

    def fails(spec, *args, **options):
        if "chunked-loss" in spec.fixes:
            raise MemprofError("no such loss")
        return profile(spec, *args, **options)

    monkeypatch.setattr("memprof.flows.ladder.runs.profile", fails)
    loss, checkpoints = [Fix(REMEDIES["chunked-loss"])], [Fix(REMEDIES["activation-checkpointing"])]
    runs.make([loss, checkpoints])
    assert len(runs._ready) == 2
    with pytest.raises(MemprofError, match="no such loss"):
        runs.with_fixes(loss)
    assert runs.with_fixes(checkpoints).trace.events and not runs._ready
