"""Reports in terminals of several widths: whole words, whole lines, and no column that is cut."""

import functools
import os
import re
import sys

import pytest
from rich.text import Text

from memprof.report.terminal.console import AlignedLines, ShellCommand, make_table, to_text
from memprof.report.terminal.layout import output_width
from tests.cli.terminal import Terminal
from tests.golden import test_analysis, test_comparison
from tests.golden.screens import assert_no_word_is_broken
from tests.golden.test_report import MIB, document
from tests.lanes import by_day
from tests.processes import ROOT, python

DOES_NOT_FIT = functools.partial(document, 2048 * MIB)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("make", [DOES_NOT_FIT, test_analysis.document, test_comparison.document])
def test_no_word_is_broken(make, width):
    assert_no_word_is_broken(make()._build_view(), width)


def test_a_table_leaves_out_what_is_least_needed():
    made = make_table("stage", ">allocated", ">delta", "~where", optional=("delta", "allocated"))
    made.add_row("layers 1-34", "1,000.00", "+3.00", Text("folder/a_module_of_some_length.py:12 forward"))
    lines = {width: to_text(made, width).splitlines() for width in (90, 64, 57, 50, 20)}
    path = "folder/a_module_of_some_length.py:12"
    assert lines[90][1:] == [f"layers 1-34   1,000.00  +3.00  {path} forward"]
    assert [line.strip() for line in lines[64][1:]] == [
        f"layers 1-34   1,000.00  {path}",
        "forward",
        "No room for: delta.",
    ]
    assert lines[50][1] == f"layers 1-34  {path}" and lines[50][-1] == "No room for: delta, allocated."
    assert "No room for" in " ".join(lines[20]) and "…" not in " ".join(lines[20])


def test_rows_leave_out_what_is_least_needed():
    made = AlignedLines(
        ("", ">peak", ">bus", ">numbers"), [("+ a", "1.00", "-", "exact")], [[Text("below")]], optional=("bus",)
    )
    assert to_text(made, 40).splitlines() == ["     peak  bus  numbers", "+ a  1.00    -    exact", "below"]
    assert to_text(made, 20).splitlines() == [
        "     peak  numbers", "+ a  1.00    exact", "below", "No room for: bus.",
    ]  # fmt: skip


def test_a_command_is_one_for_the_shell_at_every_width():
    line = "memprof profile --model-size 4B --context-length 131072 --fix chunked-loss,activation-checkpointing"
    for width in (40, 60, 200):
        text = to_text(ShellCommand(line), width)
        assert max(map(len, text.splitlines())) <= width + 2 * (width == 40)
        assert re.sub(r" \\\n\s*", " ", text).strip() == line


@pytest.mark.parametrize(
    ("said", "columns"), [("80", 80), ("", 110), ("wide", 110), ("0", 110), ("7", 20), ("9" * 9, 1000), ("-5", 110)]
)
def test_columns_of_a_pipe(said, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", said)
    assert output_width() == columns


COLOUR = re.compile(r"\x1b\[([\d;]*)m")


@pytest.mark.parametrize(
    ("options", "variables", "coloured"),
    by_day(
        [((), {}, True), (("--no-color",), {}, False), ((), {"NO_COLOR": "1"}, False), ((), {"TERM": "dumb"}, False)],
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
    ),
)
def test_colours_of_a_terminal(options, variables, coloured, tmp_path):
    DOES_NOT_FIT().save(tmp_path / "report.json")
    words = (sys.executable, "-m", "memprof", "show", str(tmp_path / "report.json"), *options)
    ours = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    shown = Terminal(list(words), {**ours, "TERM": "xterm", "PYTHONPATH": str(ROOT), **variables}, columns=90)
    assert shown.wait() == 3
    numbers = {number for one in COLOUR.findall(shown.received) for number in one.split(";")}
    assert bool(numbers & {str(number) for number in range(30, 38)}) == coloured
    assert "Does not fit" in shown.screen.text
    shown.end()


@pytest.mark.parametrize("columns", ["", "60"])
def test_a_pipe(columns, tmp_path):
    DOES_NOT_FIT().save(tmp_path / "report.json")
    words = ("-m", "memprof", "show", "report.json")
    done = python(
        *words, folder=tmp_path, env={**os.environ, "COLUMNS": columns}, libraries=("memprof.cli.show",)
    )  # without torch
    assert "\x1b" not in done.stdout
    width = max(map(len, done.stdout.splitlines()))
    assert width <= int(columns or 110) and width > int(columns or 110) - 15
