"""Which stages the terminal shows: the step that matters, in full, equal layers folded; the rest a row each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from memprof.report.document import Document, StageRow

MAX_ROWS_PER_STACK = 8
"""A stack whose layers differ too much to fold into this many rows becomes a single one."""


@dataclass(frozen=True, slots=True)
class ShownStage:
    """One row of the terminal's table."""

    name: str
    allocated_bytes: int
    delta_bytes: int
    peak_bytes: int
    reserved_bytes: int
    """Highest reserved."""
    host_bytes: int
    """Highest in host memory."""
    count: int = 1
    """Equal layers in the row; `delta_bytes` is that of all of them."""
    oom: bool = False
    """The request that the card refuses is made here."""


def shown_step(document: Document) -> int:
    """The step shown in full: the last one, unless the peak was higher before."""
    peaks = {row.step: 0 for row in document.stages}
    for row in document.stages:
        peaks[row.step] = max(peaks[row.step], row.peak_allocated_bytes)
    highest = max(peaks.values())
    return max(step for step, peak in peaks.items() if peak == highest)


def shown_stages(document: Document) -> list[ShownStage]:
    """The rows of the terminal's table."""
    full = shown_step(document)
    result: list[ShownStage] = []
    for step, rows in groupby(document.stages, key=lambda row: row.step):
        if step in (0, full):
            result += _step(list(rows))
        else:
            result.append(_summary(f"step {step}, all of it", list(rows)))
    return result


def _step(rows: list[StageRow]) -> Iterator[ShownStage]:
    peaks: dict[int, int] = {}
    for row in rows:
        if row.micro_batch:
            peaks[row.micro_batch] = max(peaks.get(row.micro_batch, 0), row.peak_allocated_bytes)
    full = max(peaks, key=lambda micro_batch: (peaks[micro_batch], micro_batch), default=0)
    summaries: list[ShownStage] = []
    for micro_batch, group in groupby(rows, key=lambda row: row.micro_batch):
        if micro_batch in (0, full):
            yield from _folded_summaries(summaries)
            summaries = []
            yield from _folded_layers(list(group))
        else:
            summaries.append(_summary(f"micro-batch {micro_batch}", list(group)))
    yield from _folded_summaries(summaries)


def _folded_summaries(summaries: list[ShownStage]) -> Iterator[ShownStage]:
    """Whole micro-batches that cost the same, as one row."""
    for _, group in groupby(summaries, key=lambda row: row.delta_bytes):
        alike = list(group)
        if len(alike) == 1:
            yield alike[0]
        else:
            first, last = alike[0].name, alike[-1].name.removeprefix("micro-batch ")
            yield ShownStage(
                f"{first}-{last}".replace("batch ", "batches "),
                alike[-1].allocated_bytes,
                sum(row.delta_bytes for row in alike),
                max(row.peak_bytes for row in alike),
                max(row.reserved_bytes for row in alike),
                max(row.host_bytes for row in alike),
                oom=any(row.oom for row in alike),
            )


def _folded_layers(rows: list[StageRow]) -> Iterator[ShownStage]:
    for stack, group in groupby(rows, key=lambda row: row.stack):
        members = list(group)
        if not stack:
            yield from (_row(row) for row in members)
            continue
        runs = [list(run) for _, run in groupby(members, key=_cost)]
        if len(runs) > MAX_ROWS_PER_STACK:
            runs = [members]
        for run in runs:
            yield _row(run[0]) if len(run) == 1 else _layers(run)


def _cost(row: StageRow) -> tuple[int, int]:
    """What the layer itself asks for: the blocks that it is given depend on what is free at the time."""
    return row.requested_delta_bytes, row.peak_requested_bytes - row.requested_bytes


def _row(row: StageRow) -> ShownStage:
    return ShownStage(
        row.name,
        row.allocated_bytes,
        row.delta_bytes,
        row.peak_allocated_bytes,
        row.peak_reserved_bytes,
        row.peak_host_bytes,
        oom=row.oom,
    )


def _layers(run: list[StageRow]) -> ShownStage:
    prefix = run[0].name.rpartition(" ")[0]
    name = f"{prefix}s {run[0].index}-{run[-1].index}"
    return ShownStage(
        name,
        run[-1].allocated_bytes,
        sum(row.delta_bytes for row in run),
        max(row.peak_allocated_bytes for row in run),
        max(row.peak_reserved_bytes for row in run),
        max(row.peak_host_bytes for row in run),
        len(run),
        any(row.oom for row in run),
    )


def _summary(name: str, rows: Iterable[StageRow]) -> ShownStage:
    rows = list(rows)
    return ShownStage(
        name,
        rows[-1].allocated_bytes,
        sum(row.delta_bytes for row in rows),
        max(row.peak_allocated_bytes for row in rows),
        max(row.peak_reserved_bytes for row in rows),
        max(row.peak_host_bytes for row in rows),
        oom=any(row.oom for row in rows),
    )
