"""What the search says of a set is so: what is given up with it, and that nothing milder fits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memprof.errors import MemprofError
from memprof.fixes.catalog import FIXES, list_tiers
from memprof.fixes.chosen import ChosenFix
from memprof.flows.ladder.build import build_ladder
from memprof.flows.ladder.runs import SpecRuns
from memprof.flows.ladder.search import _bound_peak_bytes, _cannot_fit, _find_headroom, search_fixes
from memprof.flows.profile import profile
from memprof.spec import TargetSpec
from memprof.trace.facts import DeviceFacts

SPEC = TargetSpec(model="1M", model_is_size=True, batch_size=4, context_length=2048, gpu_vram_bytes=640 << 20)
SETS = (
    ("the same numbers", ("optimizer-in-backward", "micro-batch")),
    ("the optimizer elsewhere", ("micro-batch", "cpu-offload-optimizer")),
)


@pytest.mark.slow
def test_of_two_that_do_not_go_together_the_second_may_be_the_one_that_fits():
    _, document = search_fixes(SpecRuns(SPEC), SETS)
    assert document.verdict.fits and document.ladder[-1].fixes == ("micro-batch",)
    assert document.ladder_reason == "micro-batch is enough (the same numbers)"
    assert document.ladder_left_out["optimizer-in-backward"].startswith("does not go with micro-batch: ")


@pytest.mark.nightly
def test_what_is_made_at_once_is_what_would_be_made_in_turn(monkeypatch):
    spec = TargetSpec(model="pythia-70m", context_length=2048, gpu_vram_bytes=2 << 30)
    answers = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        runs = SpecRuns(spec)
        runs.run_in_parallel([[ChosenFix(FIXES["chunked-loss"])], [ChosenFix(FIXES["activation-checkpointing"])]])
        assert len(runs._prefetched_runs) == (0 if processes == "1" else 2)
        _, document = build_ladder(runs, ["activation-checkpointing", "chunked-loss"])
        assert [rung.added for rung in document.ladder] == [None, "chunked-loss", "activation-checkpointing"]
        answers.append(document.to_json())
    assert answers[0] == answers[1]


def test_what_cannot_be_made_says_so_when_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    runs = SpecRuns(TargetSpec(model="1M", model_is_size=True, context_length=64))

    def fails(spec, *args, **options):
        if "chunked-loss" in spec.fixes:
            raise MemprofError("no such loss")
        return profile(spec, *args, **options)

    monkeypatch.setattr("memprof.flows.ladder.runs.profile", fails)
    loss, checkpoints = [ChosenFix(FIXES["chunked-loss"])], [ChosenFix(FIXES["activation-checkpointing"])]
    runs.run_in_parallel([loss, checkpoints])
    assert len(runs._prefetched_runs) == 2
    with pytest.raises(MemprofError, match="no such loss"):
        runs.run_with_fixes(loss)
    assert runs.run_with_fixes(checkpoints).trace.events and not runs._prefetched_runs


def fixes_of(*names: str) -> list[ChosenFix]:
    return [ChosenFix(FIXES[name]) for name in names]


@pytest.mark.nightly
def test_what_is_not_run_could_not_fit():
    """Activations and logits that no fix of a set frees are there in its run, whatever else it does."""
    runs = SpecRuns(TargetSpec(model="pythia-70m", batch_size=4, context_length=512))
    held = runs.original.document.peak.categories
    exact = [name for name in list_tiers()[0][1] if name not in runs.in_force()]
    for names in ([name] for name in exact):
        try:
            run = runs.run_with_fixes(fixes_of(*names))
        except MemprofError:
            continue
        assert _bound_peak_bytes(runs, fixes_of(*names)) <= run.document.peak.allocated_bytes, names
    assert _bound_peak_bytes(runs, fixes_of("chunked-loss")) == held["activations"] > 0
    assert _bound_peak_bytes(runs, fixes_of("activation-checkpointing")) == held["logits and loss"] > 0
    assert _bound_peak_bytes(runs, fixes_of("chunked-loss", "activation-checkpointing")) == 0
    assert _bound_peak_bytes(runs, fixes_of("amp-bfloat16")) == 0  # it makes all tensors smaller


def runs_on(usable, host=None):
    """Runs whose original has 1,000 bytes of activations and 500 of logits at its peak."""
    peak = SimpleNamespace(categories={"activations": 1000, "logits and loss": 500, "parameters": 7000})
    device = DeviceFacts(usable_bytes=usable, host_memory_bytes=host)
    return SimpleNamespace(original=SimpleNamespace(document=SimpleNamespace(peak=peak, device=device)))


@pytest.mark.parametrize(("usable", "too_much"), [(1000, False), (999, True), (None, False)])
def test_what_fills_the_gpu_to_the_last_byte_is_run(usable, too_much):
    assert _cannot_fit(runs_on(usable), fixes_of("chunked-loss")) is too_much


@pytest.mark.parametrize(("host", "too_much"), [(None, False), (400, False), (399, True)])
def test_what_moves_to_the_host_has_to_fit_there(host, too_much):
    """Activations are on the GPU of 600 bytes or on the host; the loss is in chunks, or recomputed."""
    runs = runs_on(600, host)
    assert _cannot_fit(runs, fixes_of("chunked-loss", "cpu-offload-activations")) is too_much
    assert not _cannot_fit(runs, fixes_of("chunked-loss", "cpu-offload-activations", "activation-checkpointing"))


def test_only_runs_that_decide_something_are_made():
    """Neither all of a kind that is enough one by one, nor what the trace of the original tells not to fit."""
    spec = TargetSpec(model="pythia-70m", batch_size=8, context_length=2048, gpu_vram_bytes=2 << 30)
    runs = SpecRuns(spec)
    usable = runs.original.document.device.usable_bytes
    held = runs.original.document.peak.categories
    assert min(held["activations"], held["logits and loss"]) > usable
    _, document = search_fixes(
        runs, [("the same numbers", ("chunked-loss", "activation-checkpointing", "fused-optimizer"))]
    )
    assert document.verdict.fits
    assert sorted(document.ladder[-1].fixes) == ["activation-checkpointing", "chunked-loss", "expandable-segments"]
    assert document.ladder_reason.endswith("; with expandable-segments more of the GPU is left, in no slower step")
    assert ", and without any one of them it does not" in document.ladder_reason
    assert len(runs) == 4  # the original, and the three rows after it


def headroom_after(
    needed: dict[tuple[str, ...], int], *, in_force: tuple[str, ...] = (), seconds: float = 1.0
) -> list[str]:
    """The fixes that are added to chunked-loss where the sets in `needed` need so many of 1,000 bytes; others fail.
    With compile a step takes `seconds`, else 1."""

    def run(fixes):
        names = tuple(fix.fix.name for fix in fixes)
        if names not in needed:
            raise MemprofError("no")
        document = SimpleNamespace(device=SimpleNamespace(total_bytes=1000, usable_bytes=None))
        fits, time = needed[names] <= 1000, seconds if COMPILE in names else 1.0
        return SimpleNamespace(needed_bytes=needed[names], document=document, fits=fits, seconds=time)

    original = SimpleNamespace(document=SimpleNamespace(device=DeviceFacts(usable_bytes=None, host_memory_bytes=None)))
    runs = SimpleNamespace(run_with_fixes=run, in_force=lambda: frozenset(in_force), original=original)
    return [fix.fix.name for fix in _find_headroom(runs, fixes_of("chunked-loss"))]


LOSS, SEGMENTS, COMPILE = "chunked-loss", "expandable-segments", "compile"


@pytest.mark.parametrize(
    ("needed", "added"),
    [
        ({(LOSS,): 950}, []),
        ({(LOSS,): 951, (LOSS, SEGMENTS): 900, (LOSS, SEGMENTS, COMPILE): 700}, [SEGMENTS]),
        ({(LOSS,): 990, (LOSS, SEGMENTS): 960, (LOSS, SEGMENTS, COMPILE): 700}, [SEGMENTS, COMPILE]),
        ({(LOSS,): 990, (LOSS, SEGMENTS): 990, (LOSS, COMPILE): 700}, [COMPILE]),  # the first saves nothing
        ({(LOSS,): 990, (LOSS, SEGMENTS): 960}, [SEGMENTS]),  # the second does not run
        ({(LOSS,): 990}, []),
    ],
)
def test_less_than_a_twentieth_of_the_gpu_is_too_little_to_leave(needed, added):
    assert headroom_after(needed) == added
    assert SEGMENTS not in headroom_after(needed | {(LOSS, COMPILE): 800}, in_force=(SEGMENTS,))


@pytest.mark.parametrize(("seconds", "added"), [(1.005, [COMPILE]), (1.006, [])])
def test_what_makes_a_step_slower_is_not_added(seconds, added):
    assert headroom_after({(LOSS,): 990, (LOSS, COMPILE): 700}, seconds=seconds) == added
