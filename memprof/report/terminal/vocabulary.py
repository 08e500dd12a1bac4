"""The result of `memprof vocab` as text for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.vocabulary import SIMULATED, CapSavings, Vocabulary, VocabularyMemory
from memprof.report.terminal.cells import choose_unit
from memprof.report.terminal.console import dim, draw_bar, make_heading, make_section, make_table
from memprof.units import KIB, format_bytes

_BAR_WIDTH = 40
_MAX_RANGES = 6
_SIZE_FIELDS = {
    "parameters": "parameters_bytes", "gradients": "gradients_bytes", "optimizer state": "optimizer_state_bytes",
    "logits and loss": "logits_bytes", "peak allocated": "peak_bytes", "needs of the GPU": "required_bytes",
}  # fmt: skip


def render(document: Vocabulary, *, quiet: bool = False) -> RenderableType:
    """Return the result of `memprof vocab` for a terminal; `quiet` leaves only the savings, or else the caps."""
    if quiet:
        return _render_caps(document) if document.savings is None else _render_savings(document.savings)
    savings = [] if document.savings is None else [_render_savings(document.savings)]
    notes = (Text(f"Note: {note}", style="yellow") for note in document.notes)
    return Group(_render_heading(document), _render_coverage(document), _render_caps(document), *savings, *notes)


def _render_heading(document: Vocabulary) -> RenderableType:
    files = "1 file" if document.files == 1 else f"{document.files:,} files"
    rows = f", {document.rows:,} row{'s' * (document.rows > 1)}" if document.rows else ""
    once = f"{document.once:,} of them occur once ({document.once / document.distinct:.1%})"
    lines = [
        make_heading("memprof vocab", ": " + ", ".join(document.corpus)),
        Text(f"{files}{rows}, {format_bytes(document.num_bytes)} of text, tokens by {document.tokenizer}"),
        Text(f"{document.tokens:,} tokens, {document.distinct:,} different; {once}"),
    ]
    if document.unseen is not None and document.vocab_size:
        share = document.unseen / document.vocab_size
        unseen = f"{document.unseen:,} of {document.vocab_size:,} ids never occur ({share:.1%})"
        lines.append(Text(unseen + _format_unseen_ids(document)))
        if document.special_unseen:
            names = ", ".join(document.special_unseen[:_MAX_RANGES])
            more = len(document.special_unseen) - _MAX_RANGES
            lines.append(Text(f"Special tokens among these, which stay: {names}" + (f", {more:,} more" * (more > 0))))
    most_common = ", ".join(f"{text!r} {count:,}" for text, count in document.most_common)
    lines.append(dim(f"Most frequent: {most_common}"))
    return Group(*lines)


def _format_unseen_ids(document: Vocabulary) -> str:
    ranges = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in document.unseen_ranges[:_MAX_RANGES]]
    more = len(document.unseen_ranges) - _MAX_RANGES
    return (": " + ", ".join(ranges) if ranges else "") + (f" and {more:,} more ranges (--json)" if more > 0 else "")


def _render_coverage(document: Vocabulary) -> RenderableType:
    table = make_table(">tokens kept", ">of the text", "|")
    for point in document.curve:
        share = _format_share(point.coverage, point.tokens >= document.distinct)
        table.add_row(f"{point.tokens:,}", share, draw_bar(point.coverage, _BAR_WIDTH))
    return make_section("\nCoverage of the most frequent tokens", table, below=1)


def _format_share(share: float, is_complete: bool) -> str:
    """Return a fraction in percent with two decimals; 100% only if `is_complete`."""
    return "100.00%" if is_complete else f"{min(share, 0.9999):.2%}"


def _render_caps(document: Vocabulary) -> RenderableType:
    lines = []
    for cap in document.caps:
        share = _format_share(cap.coverage, cap.tokens >= document.distinct)
        lost = f"{document.tokens - cap.covered:,} of {document.tokens:,} are lost"
        reserved = f"with {document.reserved} reserved, --vocab-size {cap.vocab_size}"
        lines.append(Text(f"{cap.name}: {cap.tokens:,} tokens cover {share} ({lost}); {reserved}"))
    return make_section("Caps", *lines, below=1)


def _render_savings(savings: CapSavings) -> RenderableType:
    memories = (savings.before, *savings.capped)
    max_bytes = max(getattr(memory, name) or 0 for memory in memories for name in _SIZE_FIELDS.values())
    unit = choose_unit(max_bytes, min_unit_bytes=KIB)
    table = make_table(f"|{unit.name}", *(f">{memory.name}" for memory in memories))
    table.add_row("vocabulary, tokens", *(f"{memory.vocab_size:,}" for memory in memories))
    if savings.before.num_parameters is not None:
        table.add_row("parameters, numbers", *(f"{memory.num_parameters or 0:,}" for memory in memories))
    for label, name in _SIZE_FIELDS.items():
        amounts = [getattr(m, name) for m in memories]
        if any(amount is not None for amount in amounts):
            label = "logits, one copy" if name == "logits_bytes" and savings.source != SIMULATED else label
            table.add_row(label, *("-" if amount is None else unit.format(amount) for amount in amounts))
    if savings.capped:
        table.add_row("saved", "", *(format_bytes(sum_saved_bytes(savings.before, m)) for m in savings.capped))
    if savings.before.fits is not None:
        table.add_row("fits", *("pages" if memory.pages else "yes" if memory.fits else "no" for memory in memories))
    title, legend = "by arithmetic alone, nothing was run", "saved: the sum of the rows above."
    if savings.source == SIMULATED:
        title, legend = f"simulated on a virtual {savings.gpu}", "saved: of what the GPU must have."
    notes = (dim(note) for note in (legend, *savings.assumptions))
    return make_section(make_heading("What a cap saves", f": {title}"), Text(savings.what), table, *notes, below=1)


def sum_saved_bytes(before: VocabularyMemory, after: VocabularyMemory) -> int:
    """Return the device memory that `after` saves, in bytes; without simulated runs, the sum over known categories."""
    if before.required_bytes is not None and after.required_bytes is not None:
        return before.required_bytes - after.required_bytes
    return sum((getattr(before, name) or 0) - (getattr(after, name) or 0) for name in _SIZE_FIELDS.values())
