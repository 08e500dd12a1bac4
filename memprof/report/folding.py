"""Which stages the terminal shows: the step that matters, in full, equal layers folded; the rest a row each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    resident_bytes: int | None = None
    """Measured runs: highest resident memory that was read."""
    seconds: float | None = None
    """Measured runs: of all that is in the row."""


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
            yield replace(
                alike[-1],
                name=f"{first}-{last}".replace("batch ", "batches "),
                delta_bytes=sum(row.delta_bytes for row in alike),
                peak_bytes=max(row.peak_bytes for row in alike),
                reserved_bytes=max(row.reserved_bytes for row in alike),
                host_bytes=max(row.host_bytes for row in alike),
                oom=any(row.oom for row in alike),
                resident_bytes=max((row.resident_bytes for row in alike if row.resident_bytes), default=None),
                seconds=_sum(row.seconds for row in alike),
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
    return _joined(row.name, [row])


def _layers(run: list[StageRow]) -> ShownStage:
    prefix = run[0].name.rpartition(" ")[0]
    return replace(_joined(f"{prefix}s {run[0].index}-{run[-1].index}", run), count=len(run))


def _summary(name: str, rows: Iterable[StageRow]) -> ShownStage:
    return _joined(name, list(rows))


def _joined(name: str, rows: list[StageRow]) -> ShownStage:
    """One row for several stages that follow each other."""
    return ShownStage(
        name,
        rows[-1].allocated_bytes,
        sum(row.delta_bytes for row in rows),
        max(row.peak_allocated_bytes for row in rows),
        max(row.peak_reserved_bytes for row in rows),
        max(row.peak_host_bytes for row in rows),
        oom=any(row.oom for row in rows),
        resident_bytes=max((row.resident_bytes for row in rows if row.resident_bytes), default=None),
        seconds=_sum(row.seconds for row in rows),
    )


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if known else None
