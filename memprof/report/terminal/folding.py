"""Which stages the terminal shows: the step that matters, in full, equal layers folded; the rest a row each.

Rows that come again and again (the forwards of an evaluation, the steps of a long run) are shown once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from memprof.ledger.stage_amounts import Stage
from memprof.report.documents.report import Document

T = TypeVar("T")

MAX_ROWS_PER_STACK = 8
"""A stack whose layers differ too much to fold into this many rows becomes a single one."""
MAX_PERIOD = 64
"""Rows, at the most, that are seen to take turns."""
MAX_GROUPS_OF_ROUNDS = 8
"""Rounds of the same rows that differ too much to fold into as many groups become a single one."""
NEAR = 1 / 500
"""Of the run's peak: rounds whose rows differ by less cost the same."""


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
    """Equal layers, or whole steps, in the row; `delta_bytes` is that of all of them."""
    turns: int = 1
    """How often the row came, in turn with others; `delta_bytes` is that of the last time."""
    step: int = 0
    """For a whole step: its number."""
    oom: bool = False
    """The request that the card refuses is made here."""
    resident_bytes: int | None = None
    """Measured runs: highest resident memory that was read."""
    seconds: float | None = None
    """Measured runs: of all that is in the row."""
    measured_peak_bytes: int | None = None
    """Measured on CUDA: highest allocated that torch.cuda said, `measured_reserved_bytes` reserved likewise, and
    `device_used_bytes` in use by everybody, as NVML says."""
    measured_reserved_bytes: int | None = None
    device_used_bytes: int | None = None


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
            result.append(replace(_summary(f"step {step}, all of it", list(rows)), step=step))
    return list(_folded_rounds(result, round(NEAR * document.peak.allocated_bytes)))


def _step(rows: list[Stage]) -> Iterator[ShownStage]:
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
                **_read_off(alike),
            )


def _folded_rounds(rows: list[ShownStage], near: int) -> Iterator[ShownStage]:
    """Rows that follow each other in the same order again, once for all rounds that cost the same, but for `near`."""

    def same_names(one: ShownStage, other: ShownStage) -> bool:
        return one.name == other.name or bool(one.step and other.step)

    def same_cost(one: list[ShownStage], other: list[ShownStage]) -> bool:
        return all(
            abs(a.delta_bytes - b.delta_bytes) <= near and abs(_rise(a) - _rise(b)) <= near
            for a, b in zip(one, other, strict=True)
        )

    for rounds in _repeated(rows, same_names):
        # Two models whose rows have the same names may take turns: rounds of rounds.
        groups = list(_repeated(rounds, same_cost))
        if len(groups) > MAX_GROUPS_OF_ROUNDS:
            groups = [[[members] for members in rounds]]
        for group in groups:
            yield from _in_turn([[row for members in turn for row in members] for turn in group])


def _rise(row: ShownStage) -> int:
    """The peak above what was there before."""
    return row.peak_bytes - (row.allocated_bytes - row.delta_bytes)


def _repeated(items: Sequence[T], same: Callable[[T, T], bool]) -> Iterator[list[list[T]]]:
    """`items` cut into rounds that repeat each other; what is not repeated is a round by itself."""
    begin = 0
    while begin < len(items):
        period, count = 1, 1
        for length in range(1, min(MAX_PERIOD, (len(items) - begin) // 2) + 1):
            end = begin + length
            while end < len(items) and same(items[begin + (end - begin) % length], items[end]):
                end += 1
            times = (end - begin) // length
            if times > 1 and times * length > count * period:
                period, count = length, times
        end = begin + period * count
        yield [list(items[first : first + period]) for first in range(begin, end, period)]
        begin = end


def _in_turn(rounds: list[list[ShownStage]]) -> Iterator[ShownStage]:
    """The rows of one round, for all of them."""
    alone = len(rounds[0]) == 1
    for rows in zip(*rounds, strict=True):
        first, last = rows[0], rows[-1]
        if len(rows) == 1:
            yield first
            continue
        yield replace(
            last,
            name=f"steps {first.step}-{last.step}, all of it" if first.step else first.name,
            delta_bytes=sum(row.delta_bytes for row in rows) if alone else last.delta_bytes,
            peak_bytes=max(row.peak_bytes for row in rows),
            reserved_bytes=max(row.reserved_bytes for row in rows),
            host_bytes=max(row.host_bytes for row in rows),
            count=sum(row.count for row in rows) if alone else last.count,
            turns=1 if alone else len(rows),
            oom=any(row.oom for row in rows),
            **_read_off(rows),
        )


def _folded_layers(rows: list[Stage]) -> Iterator[ShownStage]:
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


def _cost(row: Stage) -> tuple[int, int]:
    """What the layer itself asks for: the blocks that it is given depend on what is free at the time."""
    return row.requested_delta_bytes, row.peak_requested_bytes - row.requested_bytes


def _row(row: Stage) -> ShownStage:
    return _joined(row.name, [row])


def _layers(run: list[Stage]) -> ShownStage:
    prefix = run[0].name.rpartition(" ")[0]
    return replace(_joined(f"{prefix}s {run[0].index}-{run[-1].index}", run), count=len(run))


def _summary(name: str, rows: Iterable[Stage]) -> ShownStage:
    return _joined(name, list(rows))


def _joined(name: str, rows: list[Stage]) -> ShownStage:
    """One row for several stages that follow each other."""
    return ShownStage(
        name,
        rows[-1].allocated_bytes,
        sum(row.delta_bytes for row in rows),
        max(row.peak_allocated_bytes for row in rows),
        max(row.peak_reserved_bytes for row in rows),
        max(row.peak_host_bytes for row in rows),
        oom=any(row.oom for row in rows),
        **_read_off(rows),
    )


def _read_off(rows: Sequence[Stage] | Sequence[ShownStage]) -> dict[str, Any]:
    """What was measured, for several rows as one: their time, and the highest of the rest."""
    seconds = [row.seconds for row in rows if row.seconds is not None]
    found: dict[str, Any] = {"seconds": sum(seconds) if seconds else None}
    for name in ("resident_bytes", "measured_peak_bytes", "measured_reserved_bytes", "device_used_bytes"):
        found[name] = max((getattr(row, name) for row in rows if getattr(row, name) is not None), default=None)
    return found
