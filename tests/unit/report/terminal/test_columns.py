"""Columns of plain lines: which are dropped, and that no line is longer than the terminal."""

from __future__ import annotations

from memprof.report.terminal.layout import align_columns

HEADERS = ("name", ">size", ">next larger", ">size")
ROWS = [("a model", "1.00", "another model", "2.00"), ("b", "12.00", "c", "more")]


def test_a_width_that_is_enough_drops_nothing() -> None:
    lines, dropped = align_columns(HEADERS, ROWS, 35, ("size", "next larger"))
    assert max(map(len, lines)) == 35 and dropped == []


def test_the_last_column_is_dropped_and_then_the_one_before_it() -> None:
    lines, dropped = align_columns(HEADERS, ROWS, 34, ("size", "next larger"))
    assert dropped == ["size"] and lines[1] == "a model   1.00  another model"
    lines, dropped = align_columns(HEADERS, ROWS, 28, ("size", "next larger"))
    assert dropped == ["size", "next larger"] and lines == ["name      size", "a model   1.00", "b        12.00"]


def test_text_that_is_last_wraps_before_a_column_is_dropped() -> None:
    text = "a reason of many short words, which is longer than the line that it stands in"
    lines, dropped = align_columns((">row", "why"), [("1", text)], 50, ("row",))
    assert dropped == [] and lines[1].splitlines()[1].startswith(" " * 5) and max(map(len, lines[1].splitlines())) <= 50
