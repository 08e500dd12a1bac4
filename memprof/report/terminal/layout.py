"""Output width, line wrapping, and tables of plain text that drop columns where the terminal is narrow (no rich)."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from contextvars import ContextVar

WIDTH = 110  # Columns of output to a file or pipe, unless COLUMNS is set.
MIN_WIDTH, MAX_WIDTH = 20, 1000
_MIN_TEXT_WIDTH = 32  # Columns below which a column of text does not wrap before other columns are dropped.
NO_COLOR: ContextVar[bool] = ContextVar("colourless", default=False)  # Whether `--no-color` was given.


def output_width() -> int:
    """Return the width of output to stdout: COLUMNS, else the columns of the terminal, else `WIDTH`."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said):
        return min(max(int(said), MIN_WIDTH), MAX_WIDTH)
    try:
        return min(max(os.get_terminal_size(sys.stdout.fileno()).columns, MIN_WIDTH), MAX_WIDTH)
    except (OSError, ValueError):
        return WIDTH


def wrap_line(line: str, width: int, indent: str = "", hanging_indent: str | None = None) -> list[str]:
    """Return `line` wrapped between words to `width` columns; `hanging_indent` is for all lines but the first."""
    return textwrap.wrap(
        line, max(width, 40), initial_indent=indent,
        subsequent_indent=indent + "  " if hanging_indent is None else hanging_indent,
        break_on_hyphens=False, break_long_words=False,
    ) or [""]  # fmt: skip


def align_columns(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, optional: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return lines of aligned columns, headers first, and the headers of dropped columns.

    The last column wraps, if it is text, before a column of `optional` is dropped.

    Args:
        headers: one per column; `>` at the beginning right-aligns the column.
        rows: one cell per column.
        width: maximum length of a line.
        optional: columns to drop if the lines are too long, in this order; of two equal headers, the last column.
    """
    names = [header.removeprefix(">") for header in headers]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    indices, dropped_names, running = list(range(len(names))), list[str](), widths[-1]
    if not headers[-1].startswith(">"):
        longest = max(len(word) for cells in (names, *rows) for word in cells[-1].split() or [""])
        running = min(running, max(longest, _MIN_TEXT_WIDTH))
    for name in optional:
        if sum(widths[place] + 2 for place in indices[:-1]) + running <= width:
            break
        if found := [place for place in indices if names[place] == name]:
            indices.remove(found[-1])
            dropped_names.append(name)
    before = sum(widths[place] + 2 for place in indices[:-1])
    lines = []
    for line in (names, *rows):
        cells = [f"{line[one]:{'>' if headers[one].startswith('>') else '<'}{widths[one]}}" for one in indices]
        if before + len(line[-1]) > width and running <= width - before:
            words = textwrap.wrap(line[-1], width - before, break_on_hyphens=False, break_long_words=False)
            cells[-1] = f"\n{' ' * before}".join(words)
        lines.append("  ".join(cells).rstrip())
    return lines, dropped_names


def note_dropped_columns(names: Sequence[str]) -> str:
    """Return a sentence that lists the headers of dropped columns."""
    return f"No room for: {', '.join(' '.join(name.split()) for name in dict.fromkeys(names) if name.strip())}."
