"""The report of a run that has started an inference engine: the engine's own budget of the GPU's memory."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from memprof.report.documents.report import Report
from memprof.report.terminal.engine_budget import render_engine_budget


def render(document: Report, *, quiet: bool = False) -> RenderableType:
    """Return the budget of the engine that the run has started; the allocator's view is in the full report."""
    assert document.engine is not None
    text = render_engine_budget(document.engine, quiet=quiet)
    return Text(
        text if quiet else f"{text}\nMore: --full (the allocator's view: stages, tensors), --explain (assumptions)"
    )
