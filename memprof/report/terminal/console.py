"""The one console: the same text in colour for a terminal and without for files and pipes, and the house's tables."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memprof.errors import printable

WIDTH = 110
"""Columns of a text that is not for a terminal."""
_NARROWEST, _WIDEST = 20, 1000


class _Console(Console):
    """Shows the text of others as it is: it is no markup, and its control characters are visible and do nothing."""

    def __init__(self, **options: Any) -> None:
        # In a notebook rich would show everything at once, and leave the stream that it was given empty.
        super().__init__(highlight=False, markup=False, emoji=False, force_jupyter=False, **options)
        if "width" not in options and self._width is not None:  # what COLUMNS says, which may be anything
            self._width = min(max(self._width, _NARROWEST), _WIDEST)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Those with `control` are rich's own, which move the cursor.
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def terminal(stream: TextIO | None = None) -> Console:
    """The console on `stream`, stdout if it is None: in colour on a terminal, unless NO_COLOR says otherwise."""
    return _Console(file=stream)


def text_of(view: RenderableType, width: int = WIDTH) -> str:
    """`view` without colour, `width` columns wide, no blanks at the ends of lines."""
    file = io.StringIO()
    # Plain whatever FORCE_COLOR says: that is about the terminal.
    console = _Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def html_of(view: RenderableType, width: int = WIDTH) -> str:
    """`view` in colour as an element of HTML, `width` columns wide; its words are escaped."""
    console = _Console(file=io.StringIO(), width=width, record=True, force_terminal=True, legacy_windows=False)
    console.print(view)
    style = "font-family: monospace; line-height: normal; white-space: pre; overflow-x: auto"
    shown = console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
    # What has no colour of its own is written in rich's black, and a notebook may be dark.
    return shown.replace("color: #000000; text-decoration-color: #000000", "")


def show(view: RenderableType, *, pipe_width: int | None = WIDTH) -> None:
    """Print `view` to stdout: into a pipe `pipe_width` columns wide, or as COLUMNS says if that is None."""
    console = terminal()
    if console.is_terminal:
        console.print(view)
    else:
        console.file.write(text_of(view, pipe_width or console.width).lstrip("\n"))


def ansi(line: Text, columns: int) -> str:
    """A line with its colours, cut to the width of the terminal."""
    file = io.StringIO()
    line.no_wrap, line.overflow = True, "ellipsis"
    _Console(file=file, force_terminal=True, width=columns, legacy_windows=False).print(line, end="")
    return file.getvalue()


def heading(title: str, rest: str = "") -> Text:
    """A title, and what belongs to it on the same line."""
    text = Text(title, style="bold")
    return text.append(rest, style="default") if rest else text


def dim(text: str) -> Text:
    """A remark."""
    return Text(text, style="dim")


def indented(*parts: RenderableType, below: int = 0) -> Padding:
    """`parts` below each other, two columns in, with so many empty lines below."""
    return Padding(Group(*parts), (0, 0, below, 2))


def section(title: Text | str, *parts: RenderableType, below: int = 0) -> Group:
    """A title and, indented, what it is about."""
    return Group(heading(title) if isinstance(title, str) else title, indented(*parts, below=below))


def table(*headers: str, ruled: bool = False) -> Table:
    """A table in the house's style: without lines, or with one below its headers.

    What a header begins with says how its column is set: `>` figures, to the right and never broken; `|` words that
    are never broken; `~` text that is broken anywhere rather than cut off.
    """
    style = "table.header" if ruled else "dim"
    made = Table(box=SIMPLE_HEAD if ruled else None, padding=(0, 1), pad_edge=False, header_style=style)
    for header in headers:
        name, figures = header.lstrip(">|~"), header.startswith(">")
        made.add_column(
            name,
            justify="right" if figures else "left",
            no_wrap=figures or header.startswith("|"),
            overflow="fold" if header.startswith("~") else "ellipsis",
        )
    return made


def aligned(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Text]:
    """Lines of aligned columns, headers first, which begin as a table's do."""
    right = [header.startswith(">") for header in headers]
    lines = [[header.removeprefix(">") for header in headers], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    made = []
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        made.append(Text("  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in cells).rstrip()))
    made[0].stylize("dim")
    for text in made[1:]:
        text.highlight_words([" fits"], style="bold green")
        text.highlight_words([" dies", " failed"], style="red")
    return made


def bar(share: float, width: int) -> Text:
    """A bar of so much of `width` columns."""
    return Text("█" * round(share * width), style="blue")
