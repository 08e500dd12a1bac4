"""The command to try next: each situation has its own, and none is forgotten."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memprof.findings import Finding, Severity, Suggestion
from memprof.findings.edits import Edit, EditKind
from memprof.findings.exhaustion import Growth
from memprof.flows.account import analyze
from memprof.report.documents.limit import LargestSearch, LargestSearchRun
from memprof.report.documents.report import FailureRow, Report
from memprof.report.terminal.next_step import (
    choose_next_step,
    choose_step_after_analyze,
    choose_step_after_compare,
    render_next_step,
)
from memprof.run_spec import RunSpec
from memprof.spec import TargetSpec
from memprof.trace.events import FailureKind, PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts, RankFacts, Target
from tests.unit.traces import TraceBuilder

PROFILE = "memprof profile --model gpt2"
RUN = "memprof run"
SCRIPT = "--gpu h100-80gb a.py"
FINDINGS = ("read what each finding means", "memprof help findings")
FIXES = ("read what each fix does and costs", "memprof help fixes")
LIMITATIONS = ("read what cannot be simulated", "memprof help limitations")
RECOMMEND = ("find what fits this GPU, or how many of them it takes", "memprof recommend --model gpt2 --gpu h100-80gb")
LEAST = "find the cheapest set of --fix options that fits"
SEARCH = "try combinations of --fix options"
EXPANDABLE = "try whether expandable segments would reserve less", "--alloc-conf expandable_segments:True"
FOUND = (Finding("id", Severity.NOTE, "Title", None, (), ()),)
HELPS = (Finding("id", Severity.NOTE, "Title", None, (), ("chunked-loss", "activation-checkpointing")),)
CAUSE = (dataclasses.replace(FOUND[0], is_decisive=True), *HELPS)
LOCAL_CAUSE = (dataclasses.replace(CAUSE[0], edit=Edit(EditKind.DELETE, "a.py:1 f", "x")), *HELPS)
PATCH = "write this change as a diff"
FITTING, UNTIL_FULL = "show the first row that fits in full", "run it until memory runs out"
OWN_CODE = (Finding("id", Severity.NOTE, "Title", None, (), ("micro-batch",)),)


def suggested(*pairs: tuple[str | None, bool]) -> tuple[Finding, ...]:
    """Return a finding with suggestions: fix, or None for a change of the code, and whether the run then fits."""
    suggestions = tuple(Suggestion("text", fix, 1, fits, 1) for fix, fits in pairs)
    names = tuple(fix for fix, _ in pairs if fix)
    return (Finding("id", Severity.NOTE, "Title", None, (), names, suggestions=suggestions),)


def ladder(*fits: bool | None) -> tuple[Any, ...]:
    """Return rows of a baseline and of a fix more each, which fit or not."""
    return tuple(SimpleNamespace(fits=one, fixes=("x",) * i, command=f"row {i}") for i, one in enumerate(fits))


def document(*, fits: bool | None = True, growth: Growth | None = None, failure: str = "", **changes: Any) -> Report:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.new(1 << 20)
    b.trace.facts = Facts(command=changes.get("command", ""), device=DeviceFacts("A", 1 << 33))
    report = analyze(b.trace)
    row = FailureRow(failure, "forward", "Error", "message", None, None, None) if failure else None
    verdict = dataclasses.replace(report.verdict, fits=fits, growth=growth)
    return dataclasses.replace(report, **{"findings": (), "verdict": verdict, "failure": row, **changes})


def profiled(asked: dict[str, Any] | None = None, **changes: Any) -> Report:
    return document(command="profile", target=Target(TargetSpec(model="gpt2", **(asked or {})), "gpt2"), **changes)


def ran(
    asked: dict[str, Any] | None = None,
    *,
    ended: str = "steps",
    steps: int = 2,
    fixes: tuple[str, ...] = (),
    **changes: Any,
) -> Report:
    program = ProgramFacts(("a.py",), ended, None, steps, fixes, asked=RunSpec(**(asked or {})))
    return document(command="run", program=program, **changes)


def limit(largest: int | None) -> LargestSearch:
    runs = tuple(LargestSearchRun(number, 1, number == 3, "", f"memprof {number}") for number in (2, 3, 4))
    return LargestSearch("batch-size", largest, 4, runs)


@pytest.mark.parametrize(
    ("report", "step"),
    [
        (profiled(), ("find the largest batch that fits", f"{PROFILE} --gpu h100-80gb --largest batch-size")),
        (profiled({"gpus": 2}), ("read how it runs on other GPUs", "memprof help parallel")),
        (profiled({"lengths": "alpaca"}), ("read how it runs on other GPUs", "memprof help parallel")),
        (profiled({"parallel": "ddp"}), ("read how it runs on other GPUs", "memprof help parallel")),
        (profiled(limit=limit(3)), ("show the report of the largest", "memprof 3")),
        (profiled(limit=limit(None)), None),
        (profiled(failure=FailureKind.ERROR), LIMITATIONS),
        (profiled(fits=False), (LEAST, f"{PROFILE} --gpu h100-80gb --fix auto")),
        (profiled(fits=False, ladder=ladder(False, False, True, True)), (FITTING, "row 2")),
        (profiled(fits=False, ladder=ladder(True, False)), RECOMMEND),  # the baseline is no fix
        (profiled({"fixes": ("bfloat16",)}, fits=False), RECOMMEND),
        (
            profiled({"fixes": ("bfloat16",), "adapter": "lora", "gpu_vram_bytes": 8 << 30}, fits=False),
            (RECOMMEND[0], "memprof recommend --model gpt2 --adapter lora --gpu-vram 8"),
        ),
        (profiled({"fixes": ("bfloat16",), "batch_size": 99}, fits=False), RECOMMEND),  # which it looks for
        (
            profiled({"fixes": ("bfloat16",), "mode": "inference"}, fits=False),
            (RECOMMEND[0], "memprof recommend --model gpt2 --mode inference --gpu h100-80gb"),
        ),
        (profiled({"fixes": ("bfloat16",), "vocab_size": 9}, fits=False), FIXES),  # it takes no vocabulary
        (ran(), ("check whether later steps need more", f"{RUN} --steps 20 {SCRIPT}")),
        (ran(steps=20), None),
        (ran(steps=20, findings=FOUND), FINDINGS),
        (ran(ended="exit"), None),
        (ran(rank=RankFacts(0, 2)), None),
        (ran({"timeout": 2.0}, ended="timeout", fits=None), ("run the whole script", f"{RUN} --until-exit {SCRIPT}")),
        (ran({"steps": 3}, fits=None), ("run the whole script", f"{RUN} --until-exit {SCRIPT}")),
        (ran(fits=False, findings=HELPS), (LEAST, f"{RUN} --gpu h100-80gb --fix auto a.py")),
        (ran(fits=False, findings=OWN_CODE), FIXES),
        (
            ran(fits=False, findings=suggested((None, True), ("amp-bfloat16=x", True))),
            (LEAST, f"{RUN} --gpu h100-80gb --fix auto a.py"),
        ),
        (ran(fits=False, findings=suggested((None, True), ("amp-bfloat16", False))), FINDINGS),
        (
            ran(fits=False, findings=suggested((None, False), ("amp-bfloat16", False))),
            (SEARCH, f"{RUN} --gpu h100-80gb --fix auto a.py"),
        ),
        (ran(fits=False, findings=CAUSE), None),
        (ran(fits=False, findings=LOCAL_CAUSE), (PATCH, f"{RUN} --gpu h100-80gb --suggest-patch a.py")),
        (ran(fits=False, findings=CAUSE, ladder=ladder(False, True)), (FITTING, "row 1")),
        (ran(fits=False), FINDINGS),
        (ran(fits=False, ladder=ladder(False, True)), (FITTING, "row 1")),
        (ran(fits=False, ladder=ladder(False, False)), FIXES),
        (ran(fits=False, fixes=("bfloat16",)), FIXES),
        (ran(fits=False, gpus=(1, 2)), FIXES),
        (ran(fits=False, growth=Growth(1, 1, 2, None, 9)), (UNTIL_FULL, f"{RUN} --until-exit {SCRIPT}")),
        (ran(growth=Growth(1, 1, 2, 8, 9)), ("check whether later steps need more", f"{RUN} --steps 20 {SCRIPT}")),
        (ran(failure=FailureKind.REFUSED), LIMITATIONS),
        (ran(failure=FailureKind.UNKNOWN_VALUE), LIMITATIONS),
        (ran(failure=FailureKind.ERROR), ("read how a script is run, and what may stop it", "memprof help run")),
        (document(command="virtual_gpu"), None),
        (document(source="measured"), None),
        (document(source="measured", findings=FOUND), FINDINGS),
    ],
)  # fmt: skip
def test_after_a_report(report: Report, step: tuple[str, str] | None) -> None:
    assert choose_next_step(report) == step
    assert len(render_next_step(step)) == (step is not None)


def test_a_capture_that_does_not_say_how_it_was_run_has_no_command() -> None:
    program = ProgramFacts(("a.py",), "steps", None, 2, ())
    assert choose_next_step(document(command="run", program=program)) is None
    assert choose_next_step(document(command="run", program=program, findings=FOUND)) == FINDINGS


def device(
    free: int = 0, *, what: str = "peak", ooms: tuple[int, ...] = (), what_if: object = None, state_only: bool = False
) -> Any:
    return SimpleNamespace(
        what_if=what_if, ooms=ooms, moment=SimpleNamespace(what=what), state_only=state_only,
        fragmentation_at_peak=SimpleNamespace(free_bytes=free),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "purpose", "options"),
    [
        ([device(), device(what_if=1)], "show the sizes of the blocks", "--by size"),
        ([device(), device(ooms=(1,))], "show what was live when memory ran out", "--at oom"),
        ([device(9, ooms=(1,), what="oom")], *EXPANDABLE),
        ([device(), device(1)], *EXPANDABLE),
        ([device(1, state_only=True)], "show which modules hold it", "--by module"),
        ([device()], "show which modules hold it", "--by module"),
    ],
)  # fmt: skip
def test_after_an_analysis(devices: list[Any], purpose: str, options: str) -> None:
    found: Any = SimpleNamespace(devices=devices, ran_out=any(one.ooms for one in devices))
    step = choose_step_after_analyze(found, Path("a b.pickle"))
    assert step == (purpose, f"memprof analyze 'a b.pickle' {options}")


def test_after_a_comparison() -> None:
    differs: Any = SimpleNamespace(within=False)
    step = choose_step_after_compare(differs, (Path("a"), Path("b")))
    assert step == ("show every row that differs", "memprof compare a b --full --top 1000")
    assert choose_step_after_compare(differs, ()) is None
    same: Any = SimpleNamespace(within=True)
    assert choose_step_after_compare(same, (Path("a"), Path("b"))) is None
