"""The result of `--largest` (the largest batch or context that fits) as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from memprof.report.documents.limit import PAGING, LargestSearch, LargestSearchRun
from memprof.report.terminal.console import ShellCommand, dim, make_section
from memprof.units import format_bytes

_SEARCH_NAMES = {"batch-size": "largest batch", "context-length": "longest context"}


def format_limit(limit: LargestSearch) -> str:
    """Return the largest batch or context that fits, as one line of text."""
    largest = limit.largest
    return f"No {limit.what} fits" if largest is None else f"The {_SEARCH_NAMES[limit.what]} that fits: {largest:,}"


def render_limit(limit: LargestSearch, total_bytes: int) -> RenderableType:
    """Return the result of a search: the largest value that fits, the next larger one, and commands of both runs."""
    runs_by_number = {run.number: run for run in limit.runs}
    values = [limit.runs[0].number] if limit.largest is None else [limit.largest, limit.first_too_large]
    lines: list[RenderableType] = []
    for run in (runs_by_number[value] for value in values if value is not None):
        lines += [Text(_describe_run(run, total_bytes)), ShellCommand(run.command)]
    lines += [] if limit.largest is None else map(dim, _format_notes(limit, limit.largest, runs_by_number))
    return make_section(f"\n{format_limit(limit)}", *lines, below=1)


def _describe_run(run: LargestSearchRun, total_bytes: int) -> str:
    if run.needed_bytes is None:
        return f"{run.number:,} cannot be run: {run.oom_stage}"
    need = f"{run.number:,} needs {format_bytes(run.needed_bytes)}"
    if run.fits:
        spare = total_bytes - run.needed_bytes
        with_retries = f"{need} without releasing its cache, and fits, with allocator retries"
        return f"{need}, {format_bytes(spare)} to spare" if spare >= 0 else with_retries
    return f"{need} and pages" if run.oom_stage == PAGING else f"{need} and runs out of memory in {run.oom_stage}"


def _format_notes(limit: LargestSearch, largest: int, runs_by_number: dict[int, LargestSearchRun]) -> Iterator[str]:
    larger_values = [f"{n:,}" for n in runs_by_number if n > (limit.first_too_large or largest)]
    suffix = f"; of those beyond, {', '.join(larger_values)} do not fit either" if larger_values else ""
    yield f"{len(runs_by_number)} runs were made, at {', '.join(f'{n:,}' for n in runs_by_number)}{suffix}."
    fitting = [run for run in limit.runs if run.fits]
    if limit.first_too_large is None:
        yield "The search ends there: a larger one was not tried."
    if len(fitting) > 2 and fitting[-1].needed_bytes == fitting[-2].needed_bytes:
        yield "What it needs has stopped to grow with it: perhaps there is no more to put into a batch."
