"""Lines of a log without what launchers, loggers and terminals add to them."""

from __future__ import annotations

import pytest

from memprof.doctor.log_lines import clean_line, join_lines, strip_box_borders

PREFIXED = [
        "[rank0]: ", "[rank 12]: ", "[default3]:", "[7]: ",
        "(EngineCore pid=99) ", "(RayWorkerWrapper pid=2069, ip=10.0.0.1) ", "(Worker rank=3) ",
        "SUBPROCESS: ", "E1105 12:00:00.123456 140 torch/x.py:12] ", "W1105 12:00:00 /a/b.cc:1] ",
        "trainer-1  | ",
        "2024-01-02 03:04:05,678 ", "[2024-01-02 03:04:05,678] ", "2024-01-02T03:04:05.1+00:00 - ",
        "2024-01-02_03:04:05Z: ",
        "ERROR 01-02 03:04:05 [worker.py:12] ", "INFO  ", "[engine/core.py:5] ",
        # Four at the most.
        "[rank0]: 2024-01-02 03:04:05 ERROR 01-02 03:04:05 [engine.py:5] ",
    ]  # fmt: skip


def test_prefixes_are_not_of_a_line() -> None:
    for prefix in PREFIXED:
        assert clean_line(f"{prefix}RuntimeError: x") == "RuntimeError: x"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = [1]: y", "x = [1]: y"),
        ("[1]: " * 4 + "x", "x"),
        ("[1]: " * 5 + "x", "[1]: x"),
        ("\x1b[1;31merror\x1b[0m: \x1b]8;;http://x\x07x", "error: x"),
        ("10%|# \r20%|##\rerror\r\n", "error"),
        ("a | b", "b"),
        ("a || b", "a || b"),
        ("INFORMATION x", "INFORMATION x"),
        ("  indented", "  indented"),
        ("X\r\n", "X"),
    ],
)
def test_what_is_left_of_a_line(line: str, expected: str) -> None:
    assert clean_line(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("│ x = 1 │", "x = 1"),
        ("╭──── Traceback ────╮", "Traceback"),
        ("a ── b", "a ── b"),
        ("a ─── b", "a  b"),
        ("a | b", "a | b"),
    ],
)
def test_boxes_are_not_of_a_line(line: str, expected: str) -> None:
    assert strip_box_borders(line).strip() == expected


def test_lines_are_joined_by_single_spaces() -> None:
    assert join_lines("[rank0]: a\t  b\n\n[rank0]:   c  \n│ d │", 4) == "a b c d"
    numbers = "\n".join(map(str, range(20)))
    assert join_lines(numbers) == " ".join(map(str, range(14)))
    assert join_lines(numbers, 2) == "0 1"
    assert join_lines("") == ""
