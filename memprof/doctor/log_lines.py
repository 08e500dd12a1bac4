"""The text around an error in a log, and its lines without what launchers, loggers and terminals add."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of the log around a possible error: the text before its line, the text from its line on, and its line."""

    text_before: str
    text_after: str
    line: int


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_BOX_BORDER = re.compile(r"^[\s│|╭╰─╮╯❱>]*[│|╭╰]\s?|\s*[│|╮╯]\s*$|[─━]{3,}")
_LOG_PREFIX = re.compile(
    r"^(?:"
    r"\[(?:default\d*|rank ?\d+|\d+)\]: ?"  # torchrun
    r"|\([\w.:]*\s*(?:pid|rank|ip)=[^)]*\) ?"  # Ray, vLLM
    r"|SUBPROCESS: ?|[EWI]\d{4} [\d:.]+ +(?:\d+ +)?\S+:\d+\] ?"
    r"|[\w.-]+\s+\| (?=\S| {2})"  # docker compose
    r"|\[?\d{4}-\d\d-\d\d[T ,_][\d:.,]+(?:[+-]\d\d:?\d\d|Z)?\]?:? ?(?:- )?"
    r"|(?:INFO|ERROR|WARNING|CRITICAL|DEBUG)(?= ):? *(?:\d\d-\d\d [\d:]+ )?(?:\[[\w./]+:\d+\] ?)?"
    r"|\[[\w./]+:\d+\] ?"
    r")"
)


def strip_colors(text: str) -> str:
    """Return `text` without ANSI escape sequences."""
    return _ANSI.sub("", text)


def clean_line(line: str) -> str:
    """Return `line` without ANSI colors, carriage returns, and the prefixes of launchers and loggers."""
    line = strip_colors(line.rstrip("\r\n")).rpartition("\r")[2]
    for _ in range(4):
        line = _LOG_PREFIX.sub("", line)
    return line


def strip_box_borders(line: str) -> str:
    """Return `line` without the box borders that rich draws around tracebacks."""
    return _BOX_BORDER.sub("", line)


def join_lines(text: str, num_lines: int = 14) -> str:
    """Return the first `num_lines` lines of `text` as one cleaned line with single spaces."""
    lines = [strip_box_borders(clean_line(line)).strip() for line in text.split("\n")[:num_lines]]
    return re.sub(r"\s+", " ", " ".join(lines)).strip()
