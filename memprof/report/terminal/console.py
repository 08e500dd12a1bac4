"""rich consoles that print with or without colours, and common parts of terminal output: headings, tables, bars."""

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


class _LiteralConsole(Console):
    """A rich console that prints text literally: no markup, no highlighting, and escaped control characters."""

    def __init__(self, **options: Any) -> None:
        # force_jupyter=False: in a notebook rich would otherwise display the text and write nothing to `file`.
        if layout.NO_COLOR.get() and not options.get("record"):
            options["no_color"] = True
        super().__init__(highlight=False, markup=False, emoji=False, force_jupyter=False, **options)
        if "width" not in options and self._width is not None:  # what COLUMNS says, which may be anything
            self._width = min(max(self._width, layout.MIN_WIDTH), layout.MAX_WIDTH)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Those with `control` are rich's own, which move the cursor.
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def open_console(stream: TextIO | None = None) -> Console:
    """Return a console on `stream` or stdout, with colours on a terminal unless NO_COLOR or --no-color is set."""
    return _LiteralConsole(file=stream)


def to_text(view: RenderableType, width: int = layout.WIDTH) -> str:
    """Return the rich renderable `view` as plain text of `width` columns, without trailing blanks."""
    file = io.StringIO()
    # Explicit arguments override FORCE_COLOR, which is for terminals.
    console = _LiteralConsole(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def to_html(view: RenderableType, width: int = layout.WIDTH) -> str:
    """Return the rich renderable `view` as an HTML <pre> element of `width` columns, with colours and escaped text."""
    console = _LiteralConsole(file=io.StringIO(), width=width, record=True, force_terminal=True, legacy_windows=False)
    console.print(view)
    style = "font-family: monospace; line-height: normal; white-space: pre; overflow-x: auto"
    document = console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
    # rich writes text of the default colour as black, which is invisible in a dark notebook.
    return document.replace("color: #000000; text-decoration-color: #000000", "")


def print_view(view: RenderableType) -> None:
    """Print the rich renderable `view` to stdout, as wide as COLUMNS or the terminal; 110 columns in a pipe."""
    console = open_console()
    if console.is_terminal:
        console.print(view)
    else:
        console.file.write(to_text(view, layout.output_width()).lstrip("\n"))


def print_text(text: str, stream: TextIO) -> None:
    """Print plain text to `stream` as it is, but for control characters, which are escaped."""
    stream.write("\n".join(map(printable, text.splitlines())) + "\n")


def to_ansi(line: Text, columns: int) -> str:
    """Return a line with ANSI escape sequences for its colours, cut to `columns`."""
    file = io.StringIO()
    line.no_wrap, line.overflow = True, "ellipsis"
    _LiteralConsole(file=file, force_terminal=True, width=columns, legacy_windows=False).print(line, end="")
    return file.getvalue()


def make_heading(title: str, plain_text: str = "") -> Text:
    """Return a bold title, followed by `plain_text` on the same line."""
    text = Text(title, style="bold")
    return text.append(plain_text, style="default") if plain_text else text


def dim(text: str) -> Text:
    """Return text in the dim style."""
    return Text(text, style="dim")


def indent(*parts: RenderableType, below: int = 0) -> Padding:
    """Return `parts` as lines indented by two columns, followed by `below` empty lines."""
    return Padding(Group(*parts), (0, 0, below, 2))


def make_section(title: Text | str, *parts: RenderableType, below: int = 0) -> Group:
    """Return a title with `parts` indented below it and `below` empty lines after them; a `str` title becomes bold."""
    return Group(make_heading(title) if isinstance(title, str) else title, indent(*parts, below=below))


def make_item(text: Text | str) -> Table:
    """Return an item of a list: a dash, and `text` beside it on as many lines as it takes."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("-", text)
    return grid


class _FittedTable(Table):
    """A table that drops the columns named in `optional`, in this order, until it fits the console's width."""

    optional: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        dropped_headers: list[str] = []
        yield from Table.__rich_console__(self._fit_columns(console, options, dropped_headers), console, options)
        if self.show_header and any(name.strip() for name in dropped_headers):
            yield dim(layout.note_dropped_columns(dropped_headers))

    def _fit_columns(self, console: Console, options: ConsoleOptions, dropped_headers: list[str]) -> Table:
        """Return a copy of the table that fits the console; append headers of dropped columns to `dropped_headers`."""
        table, droppable = copy.copy(self), [name for name in self.optional if name in {c.header for c in self.columns}]
        while True:
            available_width = options.max_width - table._extra_width
            wide_options = options.update_width(layout.MAX_WIDTH)
            sizes = [table._measure_column(console, wide_options, column) for column in table.columns]
            # Columns of text may wrap. Other columns wrap only once there is no column left to drop.
            needed = [
                m.minimum if c.overflow == "fold" else m.maximum for m, c in zip(sizes, table.columns, strict=True)
            ]
            if sum(needed) > available_width and not droppable:
                needed = [m.maximum if c.no_wrap else m.minimum for m, c in zip(sizes, table.columns, strict=True)]
            if sum(needed) <= available_width:
                widths = _widen_columns(needed, [m.maximum for m in sizes], available_width)
                table.columns = [copy.copy(column) for column in table.columns]
                for column, width in zip(table.columns, widths, strict=True):
                    column.width = width - table._get_padding_width(column._index)
                return table
            if not droppable:
                return table  # a word that is wider than the terminal
            dropped_headers.append(name := droppable.pop(0))
            table.columns = [copy.copy(column) for column in table.columns if column.header != name]
            for index, column in enumerate(table.columns):
                column._index = index


def _widen_columns(minimums: list[int], maximums: list[int], total_width: int) -> list[int]:
    """Return column widths between `minimums` and `maximums`, widening the narrowest first, up to `total_width`."""
    widths = list(minimums)
    while (spare := total_width - sum(widths)) > 0:
        growing = [index for index, maximum in enumerate(maximums) if widths[index] < maximum]
        if not growing:
            break
        index = min(growing, key=lambda i: widths[i])
        next_width = min((widths[i] for i in growing if widths[i] > widths[index]), default=layout.MAX_WIDTH)
        widths[index] += min(spare, maximums[index] - widths[index], max(next_width - widths[index], 1))
    return widths


def make_table(*headers: str, ruled: bool = False, optional: Sequence[str] = ()) -> Table:
    """Return an empty table; `ruled` draws a line below the headers.

    The first character of a header sets the style of its column: `>` right-aligned numbers, never wrapped; `|` words,
    never wrapped; `~` text that may wrap. On a narrow terminal the columns `optional` are dropped, in this order.
    """
    style = "table.header" if ruled else "dim"
    table = _FittedTable(box=SIMPLE_HEAD if ruled else None, padding=(0, 1), pad_edge=False, header_style=style)
    table.optional = tuple(optional)
    for header in headers:
        name, is_numeric = header.lstrip(">|~"), header.startswith(">")
        table.add_column(
            name, justify="right" if is_numeric else "left", no_wrap=is_numeric or header.startswith("|"),
            overflow="fold" if header.startswith("~") else "ellipsis",
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class AlignedLines:
    """A table as plain lines of aligned columns, headers first, with the left edge of tables of `make_table`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[Sequence[RenderableType]] = ()  # Parts shown below each row.
    optional: Sequence[str] = ()  # Columns that a narrow terminal drops; of two equal headers, the last.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, dropped_headers = layout.align_columns(self.headers, self.rows, options.max_width, self.optional)
        for i, line in enumerate(map(Text, lines)):
            if i:
                line.highlight_words([" fits"], style="bold green")
                line.highlight_words([" OOM", " failed"], style="red")
            else:
                line.stylize("dim")
            yield line
            yield from self.below[i - 1] if i and self.below else ()
        if dropped_headers:
            yield dim(layout.note_dropped_columns(dropped_headers))


@dataclass(frozen=True)
class ShellCommand:
    """A shell command to copy and run; a long one is continued by backslashes."""

    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pieces = layout.wrap_line(self.line, options.max_width - 2, hanging_indent="  ")
        yield Text(" \\\n".join(pieces), no_wrap=True, overflow="ignore")


def draw_bar(share: float, width: int) -> Text:
    """Return a horizontal bar that fills the fraction `share` of `width` columns."""
    return Text("█" * round(share * width), style="blue")
