"""The first screen of `memprof compare`: what B takes instead of A, the settings that differ, and where it comes from.

It has up to about 40 lines of 100 columns; `--full` prints the whole comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.comparison import Comparison
from memprof.report.terminal.cells import format_signed_bytes
from memprof.report.terminal.comparison import (
    choose_comparison_unit,
    render_heading,
    render_settings,
    render_stages,
    render_tensors,
    render_verdict,
)
from memprof.report.terminal.console import dim
from memprof.report.terminal.next_step import choose_step_after_compare, render_next_step
from memprof.units import format_bytes

_SHOWN_TOTALS = {"allocated": "allocated", "reserved": "reserved", "device used": "of the GPU"}  # In the first line.


def render(document: Comparison, *, top: int = 10, quiet: bool = False, files: tuple[Path, ...] = ()) -> RenderableType:
    """Return the first screen of a comparison; `comparison.render` explains the arguments."""
    if quiet:
        return render_verdict(document)
    unit = choose_comparison_unit(document)
    parts = [*_render_answer(document), render_verdict(document), render_settings(document), Text("")]
    parts += [render_heading(document), render_tensors(document, top), render_stages(document, unit, top)]
    more = "More: --full (all totals, categories, fragmentation, findings), --explain (assumptions), --html FILE"
    return Group(*parts, *render_next_step(choose_step_after_compare(document, files)), dim(more))


def _render_answer(document: Comparison) -> Iterator[Text]:
    """Yield what B takes instead of A, by the totals that are known of both and differ."""
    changes = [
        f"{format_bytes(row.b_bytes)} {_SHOWN_TOTALS[row.name]} instead of {format_bytes(row.a_bytes)} "
        f"({format_signed_bytes(row.difference_bytes)})"
        for row in document.totals
        if row.name in _SHOWN_TOTALS and row.a_bytes is not None and row.b_bytes is not None and row.difference_bytes
    ]
    if changes:
        yield Text(f"B ({document.b.file}) takes ", style="bold").append(f"{', '.join(changes)}.", style="default")
