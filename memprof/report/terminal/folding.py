"""Stages that the terminal shows: the most important step in full, with equal layers folded, and one row for each
other.

Rows that repeat (the forwards of an evaluation, the steps of a long run) are shown once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from typing import Any, TypeVar

from memprof.ledger.stage_amounts import Stage
from memprof.report.documents.report import Report

T = TypeVar("T")

MAX_ROWS_PER_STACK = 8  # A stack whose layers differ too much to fold into this many rows becomes a single one.
# Rows, at the most, that are seen to take turns: batches first, and then the epochs around them.
MAX_PERIODS = (16, 64)
# Rounds of the same rows that differ too much to fold into as many groups become a single one.
MAX_GROUPS_OF_ROUNDS = 8
NEAR = 1 / 500  # Of the run's peak: rounds whose rows differ by less cost the same.


# Of several rows as one, these are the highest of any.
_HIGHEST = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes", "resident_bytes", "measured_peak_bytes",
    "measured_reserved_bytes", "device_used_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownStage(Stage):
    """One row of the terminal's table: a stage, or several successive ones."""

    count: int = 1  # Equal layers, or whole steps, in the row; `delta_bytes` is that of all of them.
    turns: int = 1  # How often the row came, in turn with others; `delta_bytes` is that of the last time.
    is_step: bool = False  # Whether the row is all of a step.
    alike: bool = True  # Whether each of several in the row changed what is held by the same, but for a fiftieth.


def shown_step(document: Report) -> int:
    """Return the step shown in full: the last one, unless an earlier one has a higher peak."""
    return max(document.stages, key=lambda row: (row.peak_allocated_bytes, row.step)).step


def shown_stages(document: Report) -> list[ShownStage]:
    """Return the rows of the terminal's table."""
    full = shown_step(document)
    result: list[ShownStage] = []
    for step, rows in groupby(document.stages, key=lambda row: row.step):
        if step in (0, full):
            result += _step(list(rows))
        else:
            result.append(_merge_stages(list(rows), name=f"step {step} (total)", is_step=True))
    for longest in MAX_PERIODS:
        result = list(_folded_rounds(result, round(NEAR * document.peak.allocated_bytes), longest))
    return result


def row_of_peak(document: Report, rows: Sequence[ShownStage]) -> int | None:
    """Return the index in `rows` of the row with the run's peak; later rows may begin with as much memory."""
    peak = document.peak
    reached = [place for place, row in enumerate(rows) if row.peak_allocated_bytes == peak.allocated_bytes]
    stacks = {row.stack for row in document.stages if row.name == peak.stage and row.stack}
    own = [place for place in reached if rows[place].name == peak.stage or rows[place].stack in stacks]
    return max(own or reached, default=None)


def _step(rows: list[Stage]) -> Iterator[ShownStage]:
    peaks = ((row.peak_allocated_bytes, row.micro_batch) for row in rows if row.micro_batch)
    full = max(peaks, default=(0, 0))[1]
    # What lies between two micro-batches goes with the first.
    owners = list(accumulate(rows, lambda last, row: last if row.name == "other" else row.micro_batch, initial=0))[1:]
    steps = [number for number, row in enumerate(rows) if row.name == "optimizer step"]
    # Where an optimizer steps between them (a GAN's), they are no micro-batches.
    word = "pass" if steps and any(owners[steps[0] :]) else "micro-batch"
    summaries: list[ShownStage] = []
    for micro_batch, group in groupby(zip(owners, rows, strict=True), key=lambda owned: owned[0]):
        members = [row for _, row in group]
        if micro_batch in (0, full):
            yield from _folded_summaries(summaries)
            summaries = []
            yield from _folded_layers(members)
        else:
            summaries.append(_merge_stages(members, name=f"{word} {micro_batch}"))
    yield from _folded_summaries(summaries)


def _folded_summaries(summaries: list[ShownStage]) -> Iterator[ShownStage]:
    """Yield whole micro-batches of equal cost as one row."""
    for _, group in groupby(summaries, key=lambda row: row.delta_bytes):
        alike = list(group)
        word, first = alike[0].name.split()
        name = alike[0].name if len(alike) == 1 else f"{word}es {first}-{alike[-1].name.split()[1]}"
        yield _merge_stages(alike, name=name)


def _folded_rounds(rows: list[ShownStage], near: int, longest: int) -> Iterator[ShownStage]:
    """Yield repeated rows once for all rounds of at most `longest` rows with the same cost, up to `near` bytes."""

    def same_names(one: ShownStage, other: ShownStage) -> bool:
        return one.name == other.name or (one.is_step and other.is_step)

    def same_cost(one: list[ShownStage], other: list[ShownStage]) -> bool:
        return all(
            abs(a.delta_bytes - b.delta_bytes) <= near and abs(_rise(a) - _rise(b)) <= near
            for a, b in zip(one, other, strict=True)
        )

    for rounds in _repeated(rows, same_names, longest):
        # Two models whose rows have the same names may take turns: rounds of rounds.
        groups = list(_repeated(rounds, same_cost, longest))
        if len(groups) > MAX_GROUPS_OF_ROUNDS:
            groups = [[[members] for members in rounds]]
        for group in groups:
            yield from _fold_rounds([[row for members in turn for row in members] for turn in group])


def _rise(row: ShownStage) -> int:
    """Return the peak minus the bytes before the row."""
    return row.peak_allocated_bytes - (row.allocated_bytes - row.delta_bytes)


def _repeated(items: Sequence[T], same: Callable[[T, T], bool], longest: int) -> Iterator[list[list[T]]]:
    """Yield `items` divided into rounds that repeat; an item without repetition is a round by itself."""
    begin = 0
    while begin < len(items):
        period, count = 1, 1
        for length in range(1, min(longest, (len(items) - begin) // 2) + 1):
            end = begin + length
            while end < len(items) and same(items[begin + (end - begin) % length], items[end]):
                end += 1
            times = (end - begin) // length
            if times > 1 and times * length > count * period:
                period, count = length, times
        end = begin + period * count
        yield [list(items[first : first + period]) for first in range(begin, end, period)]
        begin = end


def _fold_rounds(rounds: list[list[ShownStage]]) -> Iterator[ShownStage]:
    """Yield the rows of one round, merged over all rounds."""
    alone = len(rounds[0]) == 1
    for rows in zip(*rounds, strict=True):
        first, last = rows[0], rows[-1]
        several = first.is_step and len(rows) > 1
        begin, end = (re.findall(r"\d+", row.name) if several else [] for row in (first, last))
        name = f"steps {begin[0]}-{end[-1]} (total)" if several else first.name
        turns = {"delta_bytes": last.delta_bytes, "turns": sum(row.turns for row in rows)}
        yield _merge_stages(rows, name=name, **({"count": sum(row.count for row in rows)} if alone else turns))


def _folded_layers(rows: list[Stage]) -> Iterator[ShownStage]:
    for stack, group in groupby(rows, key=lambda row: row.stack):
        members = list(group)
        if not stack:
            yield from (_merge_stages([row]) for row in members)
            continue
        runs = [list(run) for _, run in groupby(members, key=_cost)]
        if len(runs) > MAX_ROWS_PER_STACK:
            runs = [members]
        for run in runs:
            prefix = run[0].name.rpartition(" ")[0]
            name = run[0].name if len(run) == 1 else f"{prefix}s {run[0].index}-{run[-1].index}"
            yield _merge_stages(run, name=name, count=len(run))


def _cost(row: Stage) -> tuple[int, int]:
    """Return the layer's own requests: its blocks also depend on free memory at that time."""
    return row.requested_delta_bytes, row.peak_requested_bytes - row.requested_bytes


def _merge_stages(rows: Sequence[Stage], **changes: Any) -> ShownStage:
    """Merge successive rows: the last one's values except for sums, highest values and `changes`."""
    amounts = {field.name: getattr(rows[-1], field.name) for field in fields(rows[-1])}
    for name in _HIGHEST:
        amounts[name] = max((getattr(row, name) for row in rows if getattr(row, name) is not None), default=None)
    seconds = [row.seconds for row in rows if row.seconds is not None]
    amounts["seconds"] = sum(seconds) if seconds else None
    deltas = [row.delta_bytes for row in rows]
    amounts["delta_bytes"] = sum(deltas)
    alike = 50 * (max(deltas) - min(deltas)) <= abs(sum(deltas)) / len(deltas)
    amounts["alike"] = alike and all(row.alike for row in rows if isinstance(row, ShownStage))
    amounts["oom"] = any(row.oom for row in rows)
    return ShownStage(**amounts | changes)
