"""The document of `memprof vocab` as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memprof.report.documents.vocabulary import SIMULATED, Memory, Savings, Vocabulary
from memprof.report.terminal.units import Unit
from memprof.units import GIB, KIB, MIB, format_bytes

_BAR_WIDTH = 40
_MAX_RANGES = 6
_FIELDS = (
    ("parameters", "parameters_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer state", "optimizer_state_bytes"),
    ("logits and loss", "logits_bytes"),
    ("peak allocated", "peak_bytes"),
    ("needs of the card", "required_bytes"),
)


def render_text(document: Vocabulary, *, width: int = 110) -> str:
    """The report without colour, `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, legacy_windows=False)
    console.print(_renderable(document))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def print_vocabulary(document: Vocabulary) -> None:
    """Print the report to standard output, in colour if it is a terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_renderable(document))
    else:
        console.file.write(render_text(document))


def _renderable(document: Vocabulary) -> RenderableType:
    parts: list[RenderableType] = [_heading(document), _curve(document), _caps(document)]
    if document.savings is not None:
        parts.append(_savings(document.savings))
    parts += [Text(f"Note: {note}", style="yellow") for note in document.notes]
    return Group(*parts)


def _heading(document: Vocabulary) -> RenderableType:
    title = Text("memprof vocab", style="bold")
    title.append(": " + ", ".join(document.corpus), style="default")
    files = "1 file" if document.files == 1 else f"{document.files:,} files"
    rows = f", {document.rows:,} row{'s' * (document.rows > 1)}" if document.rows else ""
    lines = [
        title,
        Text(f"{files}{rows}, {format_bytes(document.num_bytes)} of text, tokens by {document.tokenizer}"),
        Text(
            f"{document.tokens:,} tokens, {document.distinct:,} different; {document.once:,} of them occur once "
            f"({document.once / document.distinct:.1%})"
        ),
    ]
    if document.unseen is not None and document.vocab_size:
        share = document.unseen / document.vocab_size
        lines.append(
            Text(f"{document.unseen:,} of {document.vocab_size:,} ids never occur ({share:.1%}){_ids(document)}")
        )
        if document.special_unseen:
            names = ", ".join(document.special_unseen[:_MAX_RANGES])
            more = len(document.special_unseen) - _MAX_RANGES
            lines.append(Text(f"Special tokens among these, which stay: {names}" + (f", {more:,} more" * (more > 0))))
    most = ", ".join(f"{text!r} {count:,}" for text, count in document.most_common)
    lines.append(Text(f"Most frequent: {most}", style="dim"))
    return Group(*lines)


def _ids(document: Vocabulary) -> str:
    ranges = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in document.unseen_ranges[:_MAX_RANGES]]
    more = len(document.unseen_ranges) - _MAX_RANGES
    return (": " + ", ".join(ranges) if ranges else "") + (f" and {more:,} more ranges (--json)" if more > 0 else "")


def _curve(document: Vocabulary) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("tokens kept", justify="right", no_wrap=True)
    table.add_column("of the text", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in document.curve:
        bar = Text("█" * round(point.coverage * _BAR_WIDTH), style="blue")
        table.add_row(f"{point.tokens:,}", _percent(point.coverage, point.tokens >= document.distinct), bar)
    return Group(Text("\nCoverage of the most frequent tokens", style="bold"), Padding(table, (0, 0, 1, 2)))


def _percent(share: float, everything: bool) -> str:
    """Two decimals, and 100% only for all of it."""
    return "100.00%" if everything else f"{min(share, 0.9999):.2%}"


def _caps(document: Vocabulary) -> RenderableType:
    lines = []
    for cap in document.caps:
        share = _percent(cap.coverage, cap.tokens >= document.distinct)
        lost = document.tokens - cap.covered
        lines.append(
            Text(
                f"{cap.name}: {cap.tokens:,} tokens cover {share} ({lost:,} of {document.tokens:,} are lost); "
                f"with {document.reserved} reserved, --vocab-size {cap.vocab_size}"
            )
        )
    return Group(Text("Caps", style="bold"), Padding(Group(*lines), (0, 0, 1, 2)))


def _savings(savings: Savings) -> RenderableType:
    memories = (savings.before, *savings.capped)
    unit = _unit(max(getattr(memory, name) or 0 for memory in memories for _, name in _FIELDS))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(unit.name, no_wrap=True)
    for memory in memories:
        table.add_column(memory.name, justify="right", no_wrap=True)
    table.add_row("vocabulary, tokens", *(f"{memory.vocab_size:,}" for memory in memories))
    if savings.before.num_parameters is not None:
        table.add_row("parameters, numbers", *(f"{memory.num_parameters or 0:,}" for memory in memories))
    for label, name in _FIELDS:
        amounts = [getattr(memory, name) for memory in memories]
        if any(amount is not None for amount in amounts):
            label = "logits, one copy" if name == "logits_bytes" and savings.source != SIMULATED else label
            table.add_row(label, *("-" if amount is None else unit.amount(amount) for amount in amounts))
    if savings.capped:
        table.add_row("saved", "", *(format_bytes(saved(savings.before, memory)) for memory in savings.capped))
    if savings.before.fits is not None:
        table.add_row("fits", *("yes" if memory.fits else "no" for memory in memories))
    if savings.source == SIMULATED:
        title, legend = f"simulated on a virtual {savings.card}", "saved: of what the card must have."
    else:
        title, legend = "by arithmetic alone, nothing was run", "saved: the sum of the rows above."
    heading = Text("What a cap saves", style="bold")
    heading.append(f": {title}", style="default")
    notes = [Text(note, style="dim") for note in (legend, *savings.assumptions)]
    return Group(heading, Text(f"  {savings.what}"), Padding(Group(table, *notes), (0, 0, 1, 2)))


def saved(before: Memory, after: Memory) -> int:
    """Bytes of the card; by arithmetic, of what is known."""
    if before.required_bytes is not None and after.required_bytes is not None:
        return before.required_bytes - after.required_bytes
    total: Callable[[Memory], int] = lambda memory: sum(getattr(memory, name) or 0 for _, name in _FIELDS)  # noqa: E731
    return total(before) - total(after)


def _unit(num_bytes: int) -> Unit:
    if num_bytes >= GIB:
        return Unit("GiB", GIB)
    return Unit("MiB", MIB) if num_bytes >= MIB else Unit("KiB", KIB)
