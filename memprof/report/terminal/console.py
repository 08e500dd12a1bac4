"""The console: the same text in colour for a terminal and without colour for files and pipes, and common tables."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memprof.errors import printable
from memprof.report.terminal import layout


class _Console(Console):
    """A console that shows foreign text literally: without markup, and with visible control characters."""

    def __init__(self, **options: Any) -> None:
        # In a notebook rich would show everything at once, and leave the stream that it was given empty.
        if layout.COLOURLESS.get() and not options.get("record"):
            options["no_color"] = True
        super().__init__(highlight=False, markup=False, emoji=False, force_jupyter=False, **options)
        if "width" not in options and self._width is not None:  # what COLUMNS says, which may be anything
            self._width = min(max(self._width, layout.NARROWEST), layout.WIDEST)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Those with `control` are rich's own, which move the cursor.
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def terminal(stream: TextIO | None = None) -> Console:
    """Return the console on `stream`, or stdout: in colour on a terminal, unless NO_COLOR or --no-color forbid it."""
    return _Console(file=stream)


def text_of(view: RenderableType, width: int = layout.WIDTH) -> str:
    """Return `view` without colour, `width` columns wide, without blanks at line ends."""
    file = io.StringIO()
    # Plain whatever FORCE_COLOR says: that is about the terminal.
    console = _Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def html_of(view: RenderableType, width: int = layout.WIDTH) -> str:
    """Return `view` in colour as an HTML element, `width` columns wide, with escaped text."""
    console = _Console(file=io.StringIO(), width=width, record=True, force_terminal=True, legacy_windows=False)
    console.print(view)
    style = "font-family: monospace; line-height: normal; white-space: pre; overflow-x: auto"
    shown = console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
    # What has no colour of its own is written in rich's black, and a notebook may be dark.
    return shown.replace("color: #000000; text-decoration-color: #000000", "")


def show(view: RenderableType) -> None:
    """Print `view` to stdout: as wide as COLUMNS or the terminal, into a pipe `WIDTH` columns."""
    console = terminal()
    if console.is_terminal:
        console.print(view)
    else:
        console.file.write(text_of(view, layout.output_width()).lstrip("\n"))


def ansi(line: Text, columns: int) -> str:
    """Return a line with its colours, cut to the width of the terminal."""
    file = io.StringIO()
    line.no_wrap, line.overflow = True, "ellipsis"
    _Console(file=file, force_terminal=True, width=columns, legacy_windows=False).print(line, end="")
    return file.getvalue()


def heading(title: str, rest: str = "") -> Text:
    """Return a bold title with `rest` on the same line."""
    text = Text(title, style="bold")
    return text.append(rest, style="default") if rest else text


def dim(text: str) -> Text:
    """Return a dim remark."""
    return Text(text, style="dim")


def indented(*parts: RenderableType, below: int = 0) -> Padding:
    """Return `parts` one below another, indented by two columns, with `below` empty lines after them."""
    return Padding(Group(*parts), (0, 0, below, 2))


def section(title: Text | str, *parts: RenderableType, below: int = 0) -> Group:
    """Return a title, and its parts indented."""
    return Group(heading(title) if isinstance(title, str) else title, indented(*parts, below=below))


class _Fitted(Table):
    """A table whose columns are at least as wide as their longest word: columns without room are dropped."""

    drop: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gone: list[str] = []
        yield from Table.__rich_console__(self._fitted(console, options, gone), console, options)
        if any(name.strip() for name in gone):
            yield dim(layout.dropped_columns_note(gone))

    def _fitted(self, console: Console, options: ConsoleOptions, gone: list[str]) -> Table:
        """Return the table with widths; headers of dropped columns are appended to `gone`."""
        made, left = copy.copy(self), [name for name in self.drop if name in {c.header for c in self.columns}]
        while True:
            room = options.max_width - made._extra_width
            wide = options.update_width(layout.WIDEST)
            most = [made._measure_column(console, wide, column) for column in made.columns]
            # Running text may take several lines. A name should not; it does where all else is gone.
            needed = [
                one.minimum if c.overflow == "fold" else one.maximum for one, c in zip(most, made.columns, strict=True)
            ]
            if sum(needed) > room and not left:
                needed = [m.maximum if c.no_wrap else m.minimum for m, c in zip(most, made.columns, strict=True)]
            if sum(needed) <= room:
                widths = _grown(needed, [one.maximum for one in most], room)
                made.columns = [copy.copy(column) for column in made.columns]
                for column, width in zip(made.columns, widths, strict=True):
                    column.width = width - made._get_padding_width(column._index)
                return made
            if not left:
                return made  # a word that is wider than the terminal
            gone.append(name := left.pop(0))
            made.columns = [copy.copy(column) for column in made.columns if column.header != name]
            for index, column in enumerate(made.columns):
                column._index = index


def _grown(needed: list[int], most: list[int], room: int) -> list[int]:
    """Return widths between `needed` and `most` that share `room` columns, the narrowest first."""
    widths = list(needed)
    while (spare := room - sum(widths)) > 0 and any(w < m for w, m in zip(widths, most, strict=True)):
        growing = [place for place, (w, m) in enumerate(zip(widths, most, strict=True)) if w < m]
        place = min(growing, key=lambda one: widths[one])
        others = [widths[one] for one in growing if widths[one] > widths[place]]
        widths[place] += min(
            spare, most[place] - widths[place], max(min(others, default=layout.WIDEST) - widths[place], 1)
        )
    return widths


def table(*headers: str, ruled: bool = False, drop: Sequence[str] = ()) -> Table:
    """Return a table in the common style: without lines, or with a line below its headers.

    The first character of a header sets the style of its column: `>` figures, to the right and never broken; `|` words
    that are never broken; `~` text that may take several lines. The columns `drop` are dropped where there is no room
    for all, in this order.
    """
    style = "table.header" if ruled else "dim"
    made = _Fitted(box=SIMPLE_HEAD if ruled else None, padding=(0, 1), pad_edge=False, header_style=style)
    made.drop = tuple(drop)
    for header in headers:
        name, figures = header.lstrip(">|~"), header.startswith(">")
        made.add_column(
            name, justify="right" if figures else "left", no_wrap=figures or header.startswith("|"),
            overflow="fold" if header.startswith("~") else "ellipsis",
        )  # fmt: skip
    return made


@dataclass(frozen=True)
class Aligned:
    """Lines of aligned columns, headers first, with the same left edge as tables."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[Sequence[RenderableType]] = ()  # what stands below each row.
    # columns that are left out where there is no room for all, in this order; of two of one name, the last.
    drop: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, gone = layout.aligned(self.headers, self.rows, options.max_width, self.drop)
        for number, line in enumerate(map(Text, lines)):
            if number:
                line.highlight_words([" fits"], style="bold green")
                line.highlight_words([" OOM", " failed"], style="red")
            else:
                line.stylize("dim")
            yield line
            yield from self.below[number - 1] if number and self.below else ()
        if gone:
            yield dim(layout.dropped_columns_note(gone))


@dataclass(frozen=True)
class ShellCommand:
    """A shell command, in several lines where it is too long: it can be copied and run."""

    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pieces = layout.wrapped(self.line, options.max_width - 2, deeper="  ")
        yield Text(" \\\n".join(pieces), no_wrap=True, overflow="ignore")


def bar(share: float, width: int) -> Text:
    """Return a bar of `share` of `width` columns."""
    return Text("█" * round(share * width), style="blue")
