"""Edits are made one after another while they help, each in the text that the one before has left."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memprof.findings import Finding, Severity
from memprof.findings.edits import Edit, EditKind
from memprof.flows.account import analyze
from memprof.flows.patch import suggest
from memprof.flows.patch.source import NoPatchError
from memprof.flows.patch.suggest import make_diff, suggest_patch
from memprof.report.documents.patch import SuggestedPatch
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program, StopRule
from memprof.trace.events import PhaseKind
from memprof.trace.facts import DeviceFacts, Facts, ProgramFacts
from tests.unit.traces import TraceBuilder

SCRIPT = "a = f()\nb = f()\ng(a, b)\nh()\n"


def delete(name: str, line: int, *, severity: Severity = Severity.WARNING) -> Finding:
    edit = Edit(EditKind.DELETE, f"train.py:{line} <module>", name)
    return Finding(f"id-{name}", severity, "Title", None, (), (), edit=edit)


def report(
    *findings: Finding, fits: bool = True, required: int = 1 << 30, step: int | None = None, **run: Any
) -> Report:
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.new(1 << 20)
    program = {"command": ("train.py",), "ended": "exit", "exit_code": 0, "steps": 4, "fixes": (), **run}
    b.trace.facts = Facts(command="run", device=DeviceFacts("A", 1 << 33), program=ProgramFacts(**program))
    made = analyze(b.trace)
    stage = None if step is None else "backward"
    verdict = dataclasses.replace(made.verdict, fits=fits, required_bytes=required, oom_step=step, oom_stage=stage)
    return dataclasses.replace(made, verdict=verdict, findings=findings)


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """A function that asks for a patch of SCRIPT, given reports of its run and of each patched copy, in order."""

    def ask_for_patch(before: Report, *copies: Report | str) -> tuple[SuggestedPatch, list[str]]:
        (tmp_path / "train.py").write_text(SCRIPT)
        texts, left = [], list(copies)

        def run_patched(
            program: Program, rule: StopRule, spec: RunSpec, changed: dict[str, str], folder: str
        ) -> Report:
            texts.append(changed["train.py"])
            copy = left.pop(0)
            if isinstance(copy, str):
                raise NoPatchError(copy)
            return copy

        monkeypatch.setattr(suggest, "run_patched", run_patched)
        patch = suggest_patch(Program("train.py"), StopRule(), RunSpec(), before, str(tmp_path), lambda _: None)
        assert (tmp_path / "train.py").read_text() == SCRIPT
        return patch, texts

    return ask_for_patch


def test_until_it_fits(ask):
    full = report(delete("a", 1), delete("b", 2), fits=False, step=2)
    further = report(delete("b", 2), delete("c", 9), fits=False, step=3)
    patch, texts = ask(full, further, report(delete("c", 9)))
    assert texts == ["a = f()\nb = f()\ng(a, b)\ndel a\nh()\n", "a = f()\nb = f()\ng(a, b)\ndel b\ndel a\nh()\n"]
    assert patch.changes == (
        "train.py:1: `del a` after its last use",
        "train.py:2: `del b` after its last use",
    )
    assert patch.diff.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert [line for line in patch.diff.splitlines()[3:] if line[0] in "+-"] == ["+del b", "+del a"]
    assert patch.after is not None
    assert (patch.before.fits, patch.before.oom_step, patch.after.fits, patch.after.oom_step) == (False, 2, True, None)
    assert not patch.tried


def test_what_does_not_help_is_left_out(ask):
    both = report(delete("a", 1), delete("b", 2))
    patch, texts = ask(both, both, report(delete("a", 1), required=1 << 29))
    assert texts[1] == "a = f()\nb = f()\ng(a, b)\ndel b\nh()\n"
    assert patch.changes == ("train.py:2: `del b` after its last use",)
    assert patch.tried == ("train.py:1: `del a` after its last use: the patched program needs as much",)


@pytest.mark.parametrize(
    ("copy", "reason"),
    [
        ("the patched program fails: NameError", "NameError"),
        (report(fits=False, step=2), "runs out of memory too, in backward of step 2"),
        (report(delete("x", 1, severity=Severity.ERROR), required=1), "has another error: Title"),
        (report(required=1, exit_code=1), "ends with exit code 1"),
        (report(required=1, steps=3), "ends after 3 training steps"),
    ],
    ids=["fails", "is full", "another error", "exit code", "fewer steps"],
)
def test_no_patch(ask, copy, reason):
    patch, _ = ask(report(delete("a", 1)), copy)
    assert (patch.diff, patch.changes, patch.after) == ("", (), None)
    assert reason in patch.tried[0]


def test_a_value_that_turns_out_to_be_a_tuple(ask):
    kept = Finding("id", Severity.WARNING, "T", None, (), (), edit=Edit(EditKind.KEEP_ON_HOST, "train.py:1 f", "a"))
    failed = "the patched program fails: AttributeError: 'tuple' object has no attribute 'detach'"
    patch, texts = ask(report(kept), failed, report(required=1))
    assert texts[1].startswith("a = tuple(part.detach().cpu() for part in f())\n") and not patch.tried
    patch, texts = ask(report(kept), failed, failed.replace("tuple", "int"))
    assert patch.diff == "" and "'int'" in patch.tried[0] and len(texts) == 2


def test_a_step_that_was_cut_does_not_count(ask):
    full = report(delete("a", 1), fits=False, step=4, ended="refused", exit_code=1)
    patch, _ = ask(full, report(steps=3))
    assert patch.after is not None


def test_no_edit_is_made_twice(ask):
    always = delete("a", 1)
    patch, texts = ask(report(always, required=9), report(always, required=8))
    assert len(texts) == len(patch.changes) == 1


def test_a_library_and_a_missing_file(ask):
    edits = [Edit(EditKind.DELETE, f"{path}:1 f", "a") for path in ("/x/site-packages/y.py", "other.py")]
    patch, texts = ask(report(*(dataclasses.replace(delete("a", 1), edit=edit) for edit in edits)))
    assert not texts
    assert [reason.rpartition(": ")[2] for reason in patch.tried] == [
        "the line is a library's",
        "the file cannot be read",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\n", "a\nc\n"),
        ("a\nb", "a\nc"),
        ("a\nb", "a\nb\nc\n"),
        ("a\r\nb\r\n", "a\r\nb\r\nc\r\n"),
        ("a\x0bb\n", "c\n"),
    ],
)
def test_a_diff_can_be_applied(before, after, tmp_path):
    (tmp_path / "src").mkdir()
    file: Path = tmp_path / "src" / "a file.py"
    file.write_bytes(before.encode())
    diff = make_diff({str(file.resolve()): after}, str(tmp_path))
    subprocess.run(["git", "apply", "--whitespace=nowarn"], input=diff.encode(), cwd=tmp_path, check=True)
    assert file.read_bytes().decode() == after
