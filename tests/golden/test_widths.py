"""Reports in terminals of several widths: whole words, whole lines, and no column that is cut."""

import json
import os
import re
import sys

import pytest
from rich.text import Text

from memprof.flows.saved_files import load_json
from memprof.report.terminal.console import AlignedLines, ShellCommand, make_table, to_text
from memprof.report.terminal.layout import output_width
from tests.cli.terminal import Terminal
from tests.golden.commands import HERE, KEPT
from tests.lanes import by_day
from tests.processes import ROOT, python

REPORTS = sorted(path for path in (*KEPT.glob("*.json"), *KEPT.parent.glob("*.json")))
NO_PICTURES = ("estimate", "vocabulary")  # Which are shown by a command alone.
GRAPHICS = " ─▁▂▃▄▅▆▇█^!‼\\"
BESIDE = 16  # Columns beside a long word, in a table: one that leaves no room for these is broken.


def shown(path, tmp_path):
    document = json.loads(path.read_text(encoding="utf-8"))
    copy = tmp_path / path.name
    copy.write_text(json.dumps({"memprof_version": "", **document}), encoding="utf-8")
    return load_json(copy)._build_view()


@pytest.mark.parametrize("width", by_day([60, 80, 120], 80))
@pytest.mark.parametrize("path", [path for path in REPORTS if path.stem not in NO_PICTURES], ids=lambda path: path.stem)
def test_no_word_is_broken(path, width, tmp_path):
    view = shown(path, tmp_path)
    text = to_text(view, width)
    assert max(map(len, text.splitlines())) <= width
    whole = set(to_text(view, 1000).split())
    said = re.sub(r"No room for: ([^.]|\.\w)*\.", "", text)
    too_long = "".join(word for word in whole if len(word) > width - BESIDE and word.strip(GRAPHICS))
    broken = {word for word in said.split() if word not in whole and word.strip(GRAPHICS) and word not in too_long}
    assert not broken
    assert not too_long or "lora" in path.stem  # the paths of PEFT's modules


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
    [((), {}, True), (("--no-color",), {}, False), ((), {"NO_COLOR": "1"}, False), ((), {"TERM": "dumb"}, False)],
)
def test_colours_of_a_terminal(options, variables, coloured):
    words = (sys.executable, "-m", "memprof", "show", str(HERE / "does_not_fit.json"), *options)
    ours = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    shown = Terminal(list(words), {**ours, "TERM": "xterm", "PYTHONPATH": str(ROOT), **variables}, columns=90)
    assert shown.wait() == 3
    numbers = {number for one in COLOUR.findall(shown.received) for number in one.split(";")}
    assert bool(numbers & {str(number) for number in range(30, 38)}) == coloured
    assert "Does not fit" in shown.screen.text
    shown.end()


@pytest.mark.parametrize("columns", ["", "60", "80"])
def test_a_pipe(columns):
    words = ("-m", "memprof", "show", str(HERE / "does_not_fit.json"))
    done = python(*words, env={**os.environ, "COLUMNS": columns}, libraries=("memprof.cli.show",))  # without torch
    assert "\x1b" not in done.stdout
    width = max(map(len, done.stdout.splitlines()))
    assert width <= int(columns or 110) and width > int(columns or 110) - 15
