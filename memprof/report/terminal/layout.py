"""The width of texts, and the dropping of columns in wide tables. Needs no rich."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from contextvars import ContextVar

WIDTH = 110  # Columns of a text that is not for a terminal, unless COLUMNS says otherwise.
NARROWEST, WIDEST = 20, 1000
_RUNNING = 32  # Columns that are enough for running text.
COLOURLESS: ContextVar[bool] = ContextVar("colourless", default=False)  # Whether `--no-color` was given.


def output_width() -> int:
    """Return the width of output to stdout: COLUMNS, else the columns of the terminal, else `WIDTH`."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said):
        return min(max(int(said), NARROWEST), WIDEST)
    try:
        return min(max(os.get_terminal_size(sys.stdout.fileno()).columns, NARROWEST), WIDEST)
    except (OSError, ValueError):
        return WIDTH


def wrapped(line: str, width: int, indent: str = "", deeper: str | None = None) -> list[str]:
    """Return `line` wrapped to `width` columns, only between words; `deeper` indents all lines but the first."""
    return textwrap.wrap(
        line, max(width, 40), initial_indent=indent, subsequent_indent=indent + "  " if deeper is None else deeper,
        break_on_hyphens=False, break_long_words=False,
    ) or [""]  # fmt: skip


def aligned(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, drop: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return lines of aligned columns, headers first, and the dropped columns.

    Words in the last column may wrap below it before a column of figures is dropped.

    Args:
        headers: those that begin with `>` are for figures, to the right.
        rows: one cell per column.
        width: of the lines, at most.
        drop: columns that are dropped where there is no room for all, in this order; of two equal names, the last.
    """
    names = [header.removeprefix(">") for header in headers]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    kept, gone, running = list(range(len(names))), list[str](), widths[-1]
    if not headers[-1].startswith(">"):
        longest = max(len(word) for cells in (names, *rows) for word in cells[-1].split() or [""])
        running = min(running, max(longest, _RUNNING))
    for name in drop:
        if sum(widths[place] + 2 for place in kept[:-1]) + running <= width:
            break
        if found := [place for place in kept if names[place] == name]:
            kept.remove(found[-1])
            gone.append(name)
    before = sum(widths[place] + 2 for place in kept[:-1])
    lines = []
    for line in (names, *rows):
        cells = [f"{line[one]:{'>' if headers[one].startswith('>') else '<'}{widths[one]}}" for one in kept]
        if before + len(line[-1]) > width and running <= width - before:
            words = textwrap.wrap(line[-1], width - before, break_on_hyphens=False, break_long_words=False)
            cells[-1] = f"\n{' ' * before}".join(words)
        lines.append("  ".join(cells).rstrip())
    return lines, gone


def dropped_columns_note(names: Sequence[str]) -> str:
    """Return a note on dropped columns."""
    return f"No room for: {', '.join(' '.join(name.split()) for name in dict.fromkeys(names) if name.strip())}."
