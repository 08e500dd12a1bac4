"""Runs of a script with fixes: what is not a process of its own is told as if it were."""

from memprof.device.catalog import find_gpu
from memprof.fixes.chosen import parse_fixes
from memprof.flows.account import analyze
from memprof.flows.gpus import make_device_facts, resolve_settings
from memprof.flows.ladder.scripts import ScriptRuns, _build_error
from memprof.run_spec import RunSpec
from memprof.script import Program
from memprof.trace.facts import Facts, ProgramFacts
from tests.unit.traces import TraceBuilder

NAMES = ("expandable-segments", "activation-checkpointing")


def _recorded(fixes):
    b = TraceBuilder()
    b.new(1 << 20)
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
