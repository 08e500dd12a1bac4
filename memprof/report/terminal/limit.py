"""What `--largest` found, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from memprof.report.documents.limit import Limit, LimitRun
from memprof.report.terminal.console import Command, dim, section
from memprof.units import format_bytes

_NAMES = {"batch-size": "largest batch", "context-length": "longest context"}


def headline(limit: Limit) -> str:
    """The answer in a line."""
    return (
        f"No {limit.what} fits" if limit.largest is None else f"The {_NAMES[limit.what]} that fits: {limit.largest:,}"
    )


def render_limit(limit: Limit, total_bytes: int) -> RenderableType:
    """The number, the runs on both sides of it, and their commands."""
    runs = {run.number: run for run in limit.runs}
    if limit.largest is None:
        least = limit.runs[0]
        return section(f"\n{headline(limit)}", Text(_said(least, total_bytes)), Command(least.command), below=1)
    lines: list[RenderableType] = []
    shown = [limit.largest, *([] if limit.first_too_large is None else [limit.first_too_large])]
    for number in shown:
        lines += [Text(_said(runs[number], total_bytes)), Command(runs[number].command)]
    lines += [dim(sentence) for sentence in _notes(limit, runs)]
    return section(f"\n{headline(limit)}", *lines, below=1)


def _said(run: LimitRun, total_bytes: int) -> str:
    if run.needed_bytes is None:
        return f"{run.number:,} cannot be run: {run.dies_in}"
    need = f"{run.number:,} needs {format_bytes(run.needed_bytes)}"
    if run.fits:
        spare = total_bytes - run.needed_bytes
        return f"{need}, {format_bytes(spare)} to spare" if spare >= 0 else f"{need} if left alone, and fits only just"
    return f"{need} and dies in {run.dies_in}"


def _notes(limit: Limit, runs: dict[int, LimitRun]) -> Iterator[str]:
    assert limit.largest is not None
    after = [f"{number:,}" for number in runs if number > (limit.first_too_large or limit.largest)]
    beyond = f"; of those beyond, {', '.join(after)} do not fit either" if after else ""
    yield f"{len(runs)} runs were made, at {', '.join(f'{number:,}' for number in runs)}{beyond}."
    fitting = [run for run in limit.runs if run.fits]
    if limit.first_too_large is None:
        yield "The search ends there: a larger one was not tried."
    if len(fitting) > 2 and fitting[-1].needed_bytes == fitting[-2].needed_bytes:
        yield "What it needs has stopped to grow with it: perhaps there is no more to put into a batch."
