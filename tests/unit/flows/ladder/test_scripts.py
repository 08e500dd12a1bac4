"""Runs of a script with fixes: what is not a process of its own is told as if it were."""

import dataclasses

import pytest

from memprof.device.catalog import find_gpu
from memprof.findings import Finding, Severity
from memprof.fixes.catalog import FIXES
from memprof.fixes.chosen import parse_fixes
from memprof.flows.account import analyze
from memprof.flows.gpus import make_device_facts, resolve_settings
from memprof.flows.ladder.scripts import ScriptRuns, _build_error, search_script_fixes
from memprof.run_spec import RunSpec
from memprof.script import Program
from memprof.trace.events import PhaseKind
from memprof.trace.facts import Facts, ProgramFacts
from tests.unit.traces import TraceBuilder

NAMES = ("expandable-segments", "activation-checkpointing")


def _recorded(fixes, *sizes_of_model, batch=1 << 20, trains=True):
    """A model, and a batch for its forward; then a backward, if it `trains`."""
    b = TraceBuilder()
    for size in sizes_of_model:
        b.new(size)
    b.phase(PhaseKind.FORWARD)
    b.new(batch)
    if trains:
        b.phase(PhaseKind.BACKWARD)
    gpu = find_gpu("rtx-4090")
    b.trace.facts = Facts(
        command="run",
        program=ProgramFacts(("a.py",), "exit", 0, 0, tuple(map(str, fixes))),
        device=make_device_facts(gpu),
        allocator=resolve_settings("").facts,
    )
    return b.trace, analyze(b.trace)


def test_every_fix_in_force_is_named_also_the_allocators(monkeypatch):
    monkeypatch.setattr(ScriptRuns, "_run", lambda self, fixes: _recorded(fixes))
    spec = RunSpec(gpu="rtx-4090", steps=5)
    runs = ScriptRuns(Program("a.py"), spec, lambda doing: None)
    for names in (NAMES[:1], NAMES):
        run = runs.run_with_fixes(parse_fixes(",".join(names)))
        assert run.document.program.fixes == names
        assert run.document.program.asked == spec.edit(fixes=names)
        # The capture that --save keeps gives the same report.
        assert analyze(run.trace) == run.complete_report()
        assert run.document.allocator.alloc_conf == "expandable_segments:True"
    assert runs.original.document.program.fixes == () and not runs.original.document.allocator.alloc_conf


@pytest.mark.parametrize(("sizes_of_model", "tries"), [((5 << 30, 5 << 30), False), ((5 << 30,), True)])
def test_a_search_tries_no_fix_that_acts_only_later(monkeypatch, sizes_of_model, tries):
    """A fix of a model acts from its first forward, which a model of 40 GiB does not come to on a GPU of 24 GiB."""
    tried = []

    def run(self, fixes):
        tried.extend(map(str, fixes))
        return _recorded(fixes, *sizes_of_model, batch=5 << 30)

    monkeypatch.setattr(ScriptRuns, "_run", run)
    _, document = search_script_fixes(Program("a.py"), RunSpec(gpu="rtx-4090"), lambda doing: None)
    assert bool(tried) is tries and document.verdict.fits is False
    reason = "all others act from the first call of a model, before which memory runs out"
    assert document.ladder_reason.endswith(reason) is not tries
    assert ("acts from the first call" in document.ladder_left_out.get("compile", "")) is not tries


@pytest.mark.parametrize("trains", [True, False])
def test_a_search_tries_no_fix_for_training_in_an_inference(monkeypatch, trains):
    tried = set()

    def run(self, fixes):
        tried.update(fix.fix.name for fix in fixes)
        return _recorded(fixes, batch=10 << 30, trains=trains)

    monkeypatch.setattr(ScriptRuns, "_run", run)
    _, document = search_script_fixes(Program("a.py"), RunSpec(gpu="rtx-4090"), lambda doing: None)
    assert bool(tried & {name for name, fix in FIXES.items() if fix.training_only}) == trains and "compile" in tried
    assert ("only infers" in document.ladder_left_out.get("chunked-loss", "")) is not trains


@pytest.mark.parametrize(("grown", "tries"), [(20 << 30, False), (1 << 30, True)])
def test_a_search_tries_no_fix_against_what_grows(monkeypatch, grown, tries):
    """A run of 30 GiB on a GPU of 24: without what grows by 20 GiB it would fit, without 1 GiB it would not."""
    tried = []

    def run(self, fixes):
        tried.extend(fixes)
        trace, document = _recorded(fixes, batch=30 << 28)  # of 4 bytes
        growth = Finding("memory-growth", Severity.ERROR, "Memory grows", grown, (), ())
        return trace, dataclasses.replace(document, findings=(growth,))

    monkeypatch.setattr(ScriptRuns, "_run", run)
    _, document = search_script_fixes(Program("a.py"), RunSpec(gpu="rtx-4090"), lambda doing: None)
    assert bool(tried) is tries and ("none was tried" in document.ladder_reason) is not tries


def test_a_run_that_fails_says_what_the_script_said() -> None:
    said = (
        "Traceback (most recent call last):\n  File ...\nRuntimeError: not so\nSaved: memprof show /tmp/x/run.memprof\n"
    )
    spec = RunSpec(gpu="rtx-4090", steps=5, fixes=("compile", "chunked-loss"))
    error = _build_error(1, said, Program("a.py"), spec)
    assert error.problem == "the script fails with compile, chunked-loss" and error.value == "RuntimeError: not so"
    assert error.hint == (
        "its output and the report so far: memprof run --steps 5 --gpu rtx-4090 --fix compile,chunked-loss a.py"
    )
    assert _build_error(1, "memprof: twice as odd\n", Program("a.py"), RunSpec()).value == "exit code 1"
