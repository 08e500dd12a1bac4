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
    columns_variable = os.environ.get("COLUMNS", "")
    if columns_variable.isdecimal() and int(columns_variable):
        return min(max(int(columns_variable), MIN_WIDTH), MAX_WIDTH)
    try:
        return min(max(os.get_terminal_size(sys.stdout.fileno()).columns, MIN_WIDTH), MAX_WIDTH)
    except (OSError, ValueError):
        return WIDTH


def wrap_line(line: str, width: int, indent: str = "", hanging_indent: str | None = None) -> list[str]:
    """Return `line` wrapped between words to `width` columns; `hanging_indent` indents all lines but the first."""
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
    columns = list(zip(names, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    indices, dropped_names = list(range(len(names))), list[str]()

    def compute_last_width() -> int:
        """Return the least width of the last column that is left."""
        last = indices[-1]
        if headers[last].startswith(">"):
            return widths[last]
        longest_word = max(len(word) for cell in columns[last] for word in cell.split() or [""])
        return min(widths[last], max(longest_word, _MIN_TEXT_WIDTH))

    for name in optional:
        if sum(widths[i] + 2 for i in indices[:-1]) + compute_last_width() <= width:
            break
        if matches := [i for i in indices if names[i] == name]:
            indices.remove(matches[-1])
            dropped_names.append(name)
    indent_width = sum(widths[i] + 2 for i in indices[:-1])
    can_wrap = compute_last_width() <= width - indent_width
    lines = []
    for line in (names, *rows):
        cells = [f"{line[i]:{'>' if headers[i].startswith('>') else '<'}{widths[i]}}" for i in indices]
        text = line[indices[-1]]
        if indent_width + len(text) > width and can_wrap:
            words = textwrap.wrap(text, width - indent_width, break_on_hyphens=False, break_long_words=False)
            cells[-1] = f"\n{' ' * indent_width}".join(words)
        lines.append("  ".join(cells).rstrip())
    return lines, dropped_names


def note_dropped_columns(names: Sequence[str]) -> str:
    """Return a sentence that lists `names`, the headers of dropped columns."""
    return f"No room for: {', '.join(' '.join(name.split()) for name in dict.fromkeys(names) if name.strip())}."
