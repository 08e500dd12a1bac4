"""The first screen of a report: its look, that it fits a screen, and what stands on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memprof.findings import Evidence, Finding, Severity
from memprof.findings.finding import Suggestion
from memprof.fixes.catalog import FIXES
from memprof.report.documents.limit import LargestSearch, LargestSearchRun
from memprof.report.documents.report import Report
from memprof.report.terminal.brief import MAX_CAUSES, render
from memprof.report.terminal.console import to_text
from memprof.run_spec import RunSpec
from memprof.trace.facts import ProgramFacts
from tests.golden.screens import assert_on_one_screen
from tests.golden.test_report import MIB, check, document


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(("name", "total_mib"), [("fits", 8192), ("does_not_fit", 2048)])
def test_look(name: str, total_mib: int, width: int) -> None:
    check(f"brief_{name}_{width}.txt", to_text(render(document(total_mib * MIB)), width))


@pytest.mark.parametrize("total_mib", [8192, 2048])
def test_fits_a_screen(total_mib: int) -> None:
    assert_on_one_screen(render(document(total_mib * MIB)))


def with_findings(report: Report, *findings: Finding) -> str:
    return to_text(render(replace(report, findings=findings)), 200)


def finding(name: str, severity: Severity, **fields: object) -> Finding:
    return replace(Finding(name, severity, f"title of {name}", 1 << 30, (), ()), **fields)


def test_a_finding_that_repeats_the_verdict_is_left_out() -> None:
    report = document(2048 * MIB)
    assert "title of does-not-fit" not in with_findings(report, finding("does-not-fit", Severity.ERROR))


def test_notes_do_not_crowd_out_warnings() -> None:
    names = [f"warning-{number}" for number in range(MAX_CAUSES + 1)]
    warnings = [finding(name, Severity.WARNING) for name in names]
    text = with_findings(document(2048 * MIB), finding("note", Severity.NOTE), *warnings)
    assert "title of note" not in text
    assert [f"title of {name}" in text for name in names] == [True] * MAX_CAUSES + [False]


@pytest.mark.parametrize(("num_bytes", "is_told"), [(99, False), (100, True), (101, True), (None, True)])
def test_what_is_little_of_the_need_is_no_cause(num_bytes: int | None, is_told: bool) -> None:
    report = document(2048 * MIB)
    report = replace(report, verdict=replace(report.verdict, required_bytes=2000))
    warning = finding("idle-memory", Severity.WARNING, num_bytes=num_bytes)
    assert ("title of idle-memory" in with_findings(report, warning)) is is_told
    assert "title of idle-memory" in with_findings(report, replace(warning, severity=Severity.ERROR))
    fits = document(65536 * MIB)
    fits = replace(fits, verdict=replace(fits.verdict, required_bytes=2000))
    assert "title of idle-memory" in with_findings(fits, warning)


@pytest.mark.parametrize(("is_decisive", "order"), [(True, ["fix", "change"]), (False, ["change", "fix"])])
def test_what_makes_the_run_fit_comes_first(is_decisive: bool, order: list[str]) -> None:
    changes = (Suggestion("the change", None, 1 << 30, True, 100),)
    evidence = (Evidence("fix: the fix", source="/x/a.py:9 f"),)
    noticed = finding("idle-memory", Severity.WARNING, evidence=evidence, is_decisive=is_decisive)
    text = with_findings(document(2048 * MIB), noticed, finding("does-not-fit", Severity.ERROR, suggestions=changes))
    lines = [line for line in text.splitlines() if "the fix" in line or "the change" in line]
    assert [line.split()[-1] for line in lines] == order[: len(lines)] and len(lines) == 2 - is_decisive


def test_where_a_cause_decides_nothing_else_is_a_reason() -> None:
    cause = finding("idle-memory", Severity.WARNING, is_decisive=True)
    other = finding("logits-explosion", Severity.WARNING)
    text = with_findings(document(2048 * MIB), cause, other)
    assert "- cause: title of idle-memory\n" in text and "title of logits-explosion" not in text
    assert "- title of logits-explosion\n" in with_findings(document(2048 * MIB), other)


def test_the_fix_of_a_line_is_what_to_do_first() -> None:
    evidence = (Evidence("fix: `del out` after the last use", source="/src/train.py:12 main"),)
    cause = finding("idle-memory", Severity.WARNING, evidence=evidence, is_decisive=True)
    report = document(2048 * MIB)
    text = with_findings(report, cause, *report.findings)
    do = text.partition("\nDo\n")[2].splitlines()
    assert do[0].strip() == "- src/train.py:12: `del out` after the last use"
    assert "needs" not in do[1]  # no fix of another finding: with this one the run fits


@pytest.mark.parametrize(("total_mib", "is_told"), [(2048, False), (65536, True)])
def test_the_fix_of_a_note_is_told_where_the_run_fits(total_mib: int, is_told: bool) -> None:
    evidence = (Evidence("fix at src/train.py:12: keep the number (.item())", source="/src/train.py:12 main"),)
    report = document(total_mib * MIB)
    text = with_findings(report, finding("memory-growth", Severity.NOTE, evidence=evidence))
    assert ("- src/train.py:12: keep the number (.item())" in text.partition("\nDo\n")[2]) == is_told


def test_a_change_is_told_once_where_one_of_its_variables_has_a_line() -> None:
    evidence = (Evidence("fix at x.py:1: detach it", source="x.py:1 f"), Evidence("fix: detach it"), Evidence("fix: b"))
    text = with_findings(document(2048 * MIB), finding("x", Severity.WARNING, evidence=evidence))
    do = [line.strip() for line in text.partition("\nDo\n")[2].splitlines()[:2]]
    assert do == ["- x.py:1: detach it", "- b"]


def test_an_error_on_a_real_gpu_stands_at_the_verdict() -> None:
    text = with_findings(document(8192 * MIB), finding("device-mismatch", Severity.ERROR))
    lines = text.splitlines()
    assert lines[0] == "Fails on a real GPU: title of device-mismatch" and lines[1].startswith("Fits: ")
    assert text.count("title of device-mismatch") == 1


def test_what_takes_most_is_told_where_no_finding_explains_it() -> None:
    report = document(2048 * MIB)
    line = "- logits and loss, 2.44 GiB; largest: "
    for share, is_told in ((0.49, True), (0.51, False)):
        num_bytes = int(share * report.peak.categories["logits and loss"])
        assert (line in with_findings(report, finding("upcast", Severity.WARNING, num_bytes=num_bytes))) is is_told
    assert line not in with_findings(report, finding("idle-memory", Severity.WARNING, is_decisive=True))
    assert line in with_findings(report, finding("fragmentation", Severity.WARNING, num_bytes=3 << 30))
    fits = replace(report.verdict, fits=True, oom_stage=None)
    for retries in (0, 1):
        easy = replace(report, verdict=replace(fits, retries=retries))
        assert (line in with_findings(easy, finding("upcast", Severity.WARNING))) is bool(retries)


def test_a_page_of_the_help_is_nothing_to_do() -> None:
    report = replace(
        document(65536 * MIB), target=None, program=ProgramFacts(("a.py",), "exit", None, 2, (), asked=RunSpec())
    )
    text = with_findings(report, finding("upcast", Severity.WARNING))
    assert "title of upcast" in text and "memprof help" not in text


def test_a_change_that_does_not_fit_is_suggested_only_where_none_does() -> None:
    report = document(2048 * MIB)
    changes = (Suggestion("compile: needs 1", "compile", 1, False, 1), Suggestion("lora: needs 2", "lora", 2, True, 1))
    one, other = (finding("x", Severity.WARNING, suggestions=(change,)) for change in changes)
    assert "- --fix compile (" in with_findings(report, one)
    text = with_findings(report, one, other)
    assert "- --fix lora (" in text and "compile (" not in text


def test_a_fix_says_what_it_changes_and_a_change_of_the_program_is_as_it_is() -> None:
    fix = Suggestion("micro-batch=4: needs 1", "micro-batch=4", 1, True, 1)
    change = Suggestion("use cdist: needs 2", None, 2, True, 1)
    code = Suggestion("model.to(torch.bfloat16): needs 3", "bfloat16", 3, True, 1)  # of a script, which has no option
    text = with_findings(document(2048 * MIB), finding("x", Severity.WARNING, suggestions=(fix, change, code)))
    assert "- model.to(torch.bfloat16): needs 3\n" in text and "--fix bfloat16" not in text
    assert f"- --fix micro-batch=4 ({FIXES['micro-batch'].changes}): needs 1\n" in text
    assert "- use cdist: needs 2\n" in text


def test_the_line_to_change_is_quoted_where_its_file_is_as_it_was_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1\nkept.append(out)\n", encoding="utf-8")
    fixes = tuple(Evidence("fix: drop it", source=source) for source in ("train.py:2 main", "gone.py:2 main"))
    report = replace(document(2048 * MIB), findings=(finding("x", Severity.WARNING, evidence=fixes),))
    lines = [line.strip() for line in to_text(render(report, code_folder=tmp_path), 200).splitlines()]
    assert lines[lines.index("- train.py:2: drop it") + 1] == "kept.append(out)"
    assert lines[lines.index("- gone.py:2: drop it") + 1].startswith("- ")
    assert "kept.append" not in to_text(render(report), 200)


def test_the_tensor_that_is_refused_has_its_line() -> None:
    lines = to_text(render(document(2048 * MIB)), 200).splitlines()
    assert "- failed allocation: 1,000.00 MiB, [4096x64000] float32 by .to(), at tiny/loss.py:7" in lines


def test_the_code_of_a_failed_allocation_is_quoted_once(tmp_path: Path) -> None:
    """Of the innermost line that is the program's own; where it is what to change, it stands there."""
    (tmp_path / "train.py").write_text("def loss():\n    return logits.float()\n", encoding="utf-8")
    report = document(2048 * MIB)
    library = tmp_path / "library.py"
    library.write_text("return x\n")
    sources = {"oom_source": f"{library}:1 forward", "oom_callers": ("train.py:2 loss", "train.py:1 main")}
    report = replace(report, verdict=replace(report.verdict, **sources), findings=())
    lines = to_text(render(report, code_folder=tmp_path), 200).splitlines()
    failed = next(number for number, line in enumerate(lines) if line.startswith("- failed allocation: "))
    assert lines[failed + 1].strip() == "return logits.float()"
    change = Suggestion("chunks: needs 2", None, 2, True, 1, source="train.py:2 loss")
    changed = replace(report, findings=(finding("x", Severity.WARNING, suggestions=(change,)),))
    lines = [line.strip() for line in to_text(render(changed, code_folder=tmp_path), 200).splitlines()]
    assert lines.count("return logits.float()") == 1
    assert lines[lines.index("- chunks: needs 2") + 1] == "return logits.float()"


def test_the_first_change_of_a_cause_says_what_the_run_needs_with_it() -> None:
    fixes = tuple(Evidence(f"fix: {name}", source=f"/src/train.py:{name} main") for name in ("1", "2"))
    report = document(2048 * MIB)
    needs = report.peak.device_used_bytes - report.peak.reserved_bytes
    for is_decisive, left in ((True, 1024 * MIB), (True, 2048 * MIB - needs + 1), (False, 1024 * MIB)):
        evidence = (*fixes, Evidence("effect", required_bytes=left))
        text = with_findings(
            report, finding("idle-memory", Severity.WARNING, evidence=evidence, is_decisive=is_decisive)
        )
        told = ": needs 1.42 GiB instead of 4.09 GiB" if is_decisive and left == 1024 * MIB else ""
        assert f"- src/train.py:1: 1{told}\n" in text and "- src/train.py:2: 2\n" in text


def test_what_keeps_the_tensors_of_a_cause_has_a_row_and_the_rest_adds_up() -> None:
    report = document(2048 * MIB)
    optimizer_bytes = report.peak.categories["optimizer state"]
    culprits = {"list `kept`": {"logits and loss": 1 << 30}, "dict `ckpt`": {"optimizer state": optimizer_bytes}}
    shown = replace(report, peak=replace(report.peak, culprits=culprits))
    rows = [line.split("  ") for line in to_text(render(shown), 100).partition("\nAt the peak")[2].splitlines()[1:6]]
    sizes = {row[1].strip(): next(word.strip() for word in row[2:] if word.strip()) for row in rows}
    whole = report.peak.categories["logits and loss"] / (1 << 30)
    assert sizes["list `kept`"] == "1.00" and sizes["logits and loss"] == f"{whole - 1:.2f}"
    assert "dict `ckpt`" in sizes and "optimizer state" not in sizes


@pytest.mark.parametrize(("num_bytes", "is_told"), [(25, True), (24, False)])
def test_a_small_saving_is_no_suggestion_where_memory_ended_the_run(num_bytes: int, is_told: bool) -> None:
    changes = (Suggestion("large", None, 1, True, 100), Suggestion("small", None, 1, True, num_bytes))
    report = replace(document(2048 * MIB), findings=(finding("x", Severity.WARNING, suggestions=changes),))
    for ended, shown in (("refused", is_told), ("exit", True)):
        program = ProgramFacts(("a.py",), ended, None, 2, (), asked=RunSpec())
        assert ("- small\n" in to_text(render(replace(report, program=program)), 100)) is shown


@pytest.mark.parametrize(("is_decisive", "is_first"), [(True, True), (False, False)])
def test_what_is_free_in_pieces_comes_last_where_it_is_not_the_cause(is_decisive: bool, is_first: bool) -> None:
    """Of a run that fits with retries."""
    report = document(65536 * MIB)
    report = replace(report, verdict=replace(report.verdict, retries=1))
    pieces = finding("fragmentation", Severity.WARNING, is_decisive=is_decisive)
    text = with_findings(report, pieces, finding("evaluation-accumulates", Severity.WARNING, is_decisive=is_decisive))
    assert (text.index("title of frag") < text.index("title of eval")) == is_first


def test_what_takes_the_cause_away_is_told_first_however_little_it_saves() -> None:
    own, large = Suggestion("own", None, 1, True, 1), Suggestion("large", None, 1, True, 100)
    program = ProgramFacts(("a.py",), "refused", None, 2, (), asked=RunSpec())
    for is_decisive, told in ((True, ["own", "large"]), (False, ["large"])):
        cause = finding("x", Severity.WARNING, is_decisive=is_decisive, suggestions=(own,))
        findings = (cause, finding("does-not-fit", Severity.WARNING, suggestions=(large,)))
        text = to_text(render(replace(document(2048 * MIB), program=program, findings=findings)), 100)
        do = [line.strip(" -") for line in text.partition("\nDo\n")[2].splitlines()]
        assert [line for line in do if line in ("own", "large")] == told


def test_what_else_helps_is_told_where_the_cause_has_no_line_to_change() -> None:
    change = Suggestion("text of the change", None, 1, True, 1)
    cause = finding("fragmentation", Severity.WARNING, is_decisive=True, suggestions=(change,))
    other = finding("x", Severity.WARNING, evidence=(Evidence("fix at train.py:3: delete it"),))
    assert "text of the change" in with_findings(document(2048 * MIB), cause, other)


def test_every_shown_cause_and_error_has_its_fix() -> None:
    causes = [
        finding(f"x{n}", Severity.WARNING, evidence=(Evidence(f"fix at train.py:{n}: delete it"),))
        for n in range(MAX_CAUSES)
    ]
    error = finding("device-mismatch", Severity.ERROR, evidence=(Evidence("fix: move it", source="/src/a.py:9 f"),))
    refused = finding("does-not-fit", Severity.ERROR)
    text = with_findings(document(2048 * MIB), error, refused, *causes)
    assert "- src/a.py:9: move it" in text
    assert all(f"- train.py:{n}: delete it" in text for n in range(MAX_CAUSES))


def test_the_result_of_a_search_comes_first() -> None:
    runs = tuple(LargestSearchRun(number, 1, number < 4, "loss", f"memprof {number}") for number in (2, 3, 4))
    report = replace(document(8192 * MIB), limit=LargestSearch("batch-size", 3, 4, runs))
    assert to_text(render(report), 100).strip().startswith("The largest batch that fits: 3\n")
