"""No option is lost on the way: into a command that is printed, or a run that a search makes, every one is carried."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import memprof.cli.profile as profile_room
import memprof.cli.run as run_room
from memprof.command_line import make_profile_command, make_run_command
from memprof.errors import MemprofError
from memprof.findings import Finding, Severity
from memprof.fixes.chosen import parse_fixes
from memprof.flows import limit as limit_flow
from memprof.flows.ladder.runs import SpecRuns
from memprof.flows.ladder.scripts import ScriptRuns, run_script_process
from memprof.report.terminal.next_step import choose_next_step
from memprof.run_spec import SETTINGS_VARIABLE, RunSpec
from memprof.script import Program
from memprof.spec import TargetSpec, get_options
from memprof.units import parse_gib
from tests.unit.report.terminal.test_next_step import profiled, ran

# Of options that take a text, or are best not given any of their choices.
WORDS = {
    "alloc_conf": "expandable_segments:True", "gpu": "rtx-4090", "ranks": "0,1", "lengths": "alpaca", "model": "gpt2",
    "lora_targets": "c_attn", "npt_layers": "0,-1", "freeze": "wte*,*.bias", "parallel": "ddp", "quantize": "nf4",
    "npt": "low-rank", "dtype": "float16", "device": "cpu", "torch_release": "2.9",
}  # fmt: skip
# What an option asks for beside it.
NEEDS: dict[str, dict[str, Any]] = {
    **{key: {"adapter": "lora"} for key in ("lora_rank", "lora_targets", "lora_dropout", "quantize")},
    "double_quant": {"adapter": "lora", "quantize": "nf4"},
    **{key: {"npt": "low-rank"} for key in ("npt_rank", "npt_layers", "npt_num_ranks", "npt_chunk", "npt_init")},
    "npt_combine": {"npt": "low-rank", "npt_num_ranks": 2},
    "new_tokens": {"mode": "inference"},
    **{key: {"compile": True} for key in ("compile_mode", "compile_layers")},
    "rank": {"gpus": 4},
    "shown_gpu": {"gpus": 4},
    "ranks": {"gpus": 2},
    "model_is_size": {"model": "4B"},
    "parallel": {"gpus": 2},
}
FIXED = Finding("id", Severity.NOTE, "Title", None, (), ("activation-checkpointing",))
SCRIPT = ("train.py", "--rows", "7")


def other(kind: type, name: str) -> Any:
    """A value of the field that it has not by default."""
    field, about = kind.__dataclass_fields__[name], get_options(kind)[name]  # type: ignore[attr-defined]
    if about.parse is parse_gib:
        return 3 << 30
    if isinstance(field.default, bool):
        return not field.default
    if name in WORDS:
        return WORDS[name]
    if about.choices:
        return next(choice for choice in reversed(about.choices) if choice != field.default)
    return 0.25 if "float" in str(field.type) else 3


def specs(kind: Any, **always: Any) -> Iterator[Any]:
    """One with each option, and what that asks for."""
    for name in get_options(kind):
        values = always | NEEDS.get(name, {}) | {name: other(kind, name)}
        yield pytest.param(kind(**values), id=name)


RUNS = list(specs(RunSpec))
TARGETS = list(specs(TargetSpec, model="gpt2"))


@pytest.fixture
def asked(memprof, script, monkeypatch) -> Callable[[Sequence[str]], Any]:
    """What `memprof WORDS` asks for: a RunSpec and how, or a TargetSpec and how; nothing is run."""
    found: list[Any] = []

    def note_script(program: Program, rule: Any, request: Any) -> int:
        found.append((request.build_spec(), program.command, request))
        return 0

    def note_target(spec: TargetSpec, how: Any, progress: Any, **others: Any) -> Any:
        found.append((spec, how.device, how))
        raise MemprofError("this is enough")

    for name in ("_run_script", "_run_ranks", "_run_ladder"):
        monkeypatch.setattr(run_room, name, note_script)
    monkeypatch.setattr(profile_room, "_run", note_target)
    script("", "train.py")

    def ask(words: Sequence[str]) -> Any:
        found.clear()
        result = memprof(*words)
        assert found, result.stderr
        return found[0]

    return ask


@pytest.mark.parametrize("spec", RUNS)
def test_what_is_printed_after_a_script_has_all_its_options(asked, spec):
    run = ran(steps=3)
    run = dataclasses.replace(run, program=dataclasses.replace(run.program, asked=spec, command=SCRIPT))
    verdict = run.verdict
    cases = {
        "later": (run, {"steps": 20}),
        "all": (
            dataclasses.replace(run, verdict=dataclasses.replace(verdict, fits=None)),
            {"until_exit": True, "steps": None, "timeout": None},
        ),
        "fix": (dataclasses.replace(run, verdict=dataclasses.replace(verdict, fits=False), findings=(FIXED,)), {}),
    }
    for name, (document, changes) in cases.items():
        what, command = choose_next_step(document)
        if name == "fix" and (spec.gpus or spec.device != "virtual" or spec.nodes):
            continue  # several GPUs, and what is measured, have no ladder
        if name == "later" and spec.until_exit:
            continue  # there are no later ones
        again, words, request = asked(shlex.split(command)[1:])
        assert (again, tuple(words)) == (spec.edit(**changes), SCRIPT), what
        assert request.is_search == (name == "fix")


@pytest.mark.parametrize("spec", RUNS)
def test_a_run_of_a_search_has_all_options(asked, spec, monkeypatch):
    started: list[Any] = []

    def run(words: Sequence[str], **options: Any) -> Any:
        started.append((*asked(words[words.index("run") :]), options["env"]))
        return subprocess.CompletedProcess(words, 1, None, "")

    monkeypatch.setattr(subprocess, "run", run)
    fixed = spec.edit(fixes=("chunked-loss", "micro-batch=2"))
    with pytest.raises(MemprofError):
        run_script_process(Program(SCRIPT[0], SCRIPT[1:]), fixed)
    ((again, command, request, environment),) = started
    assert again == fixed.edit(beyond=True) and tuple(command) == SCRIPT and request.save
    assert environment[SETTINGS_VARIABLE] == "off"


@pytest.mark.parametrize("spec", RUNS)
def test_rows_of_a_script_have_all_options(asked, spec, monkeypatch):
    monkeypatch.setattr(ScriptRuns, "_add", lambda self, fixes: None)
    runs = ScriptRuns(Program(SCRIPT[0], SCRIPT[1:]), spec, lambda doing: None)
    for fits, beyond in ((True, spec.beyond), (False, True), (None, True)):  # as the row itself was run
        again, _, _ = asked(shlex.split(runs.format_command(parse_fixes("chunked-loss"), fits=fits))[1:])
        assert again == spec.edit(fixes=("chunked-loss",), beyond=beyond)


def assert_same(again: TargetSpec, device: str, spec: TargetSpec) -> None:
    """As a GPU is named, `auto` simulates it."""
    assert again == spec.edit(device="virtual")
    assert device == ("auto" if spec.device == "virtual" else spec.device)


@pytest.mark.parametrize("spec", TARGETS)
def test_rows_of_a_target_have_all_options(asked, spec, monkeypatch):
    monkeypatch.setattr(SpecRuns, "_add", lambda self, fixes: None)
    again, device, how = asked(shlex.split(SpecRuns(spec).format_command(parse_fixes("chunked-loss"), fits=True))[1:])
    assert_same(again, device, spec)
    assert how.fix == "chunked-loss"


@pytest.mark.parametrize("spec", [one for one in TARGETS if one.id not in ("device", "parallel", "gpus", "lengths")])
def test_what_is_printed_after_a_target_has_all_its_options(asked, spec):
    document = profiled()
    document = dataclasses.replace(document, target=dataclasses.replace(document.target, asked=spec))
    full = dataclasses.replace(document, verdict=dataclasses.replace(document.verdict, fits=False))
    for one in (document, full):
        _, command = choose_next_step(one)
        if command.startswith("memprof help"):
            assert (spec.gpus > 1 and spec.parallel is None) or spec.lengths
            continue
        again, device, how = asked(shlex.split(command)[1:])
        assert_same(again, device, spec)
        assert how.is_search if one is full else how.largest == "batch-size"


@pytest.mark.parametrize("spec", [TargetSpec(model="gpt2", zero_grad="zero"), RunSpec(worst_batch=True)])
def test_both_sides_of_a_limit_have_all_options(spec, monkeypatch):
    """Of what does not fit the whole need is claimed, which a script shows past a full GPU alone."""
    document = profiled()

    def run(*of_a_run: Any) -> Any:
        number = int(of_a_run[0].arguments[0]) if isinstance(spec, RunSpec) else of_a_run[0].batch_size
        verdict = dataclasses.replace(document.verdict, fits=number < 3, required_bytes=number << 30)
        return None, dataclasses.replace(document, verdict=verdict)

    monkeypatch.setattr(limit_flow, "run_script_process", run)
    monkeypatch.setattr(limit_flow, "profile", run)
    if isinstance(spec, RunSpec):
        _, found = limit_flow.find_largest_for_script(Program("a.py", ("{}",)), spec, "batch-size")
    else:
        _, found = limit_flow.find_largest_for_spec(spec, "batch-size")
    for row in found.limit.runs:
        if isinstance(spec, RunSpec):
            assert row.command == make_run_command(spec.edit(beyond=not row.fits), ("a.py", str(row.number)))
        else:
            assert row.command == make_profile_command(spec.edit(batch_size=row.number))
