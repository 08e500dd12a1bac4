"""Folding of a run's stages into the rows of the stage table: equal layers and repeated steps become one row.

The step with the highest peak is shown in full, every other step as one row.
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

MAX_ROWS_PER_STACK = 8  # A stack of layers with more different costs than this is shown as one row.
# Maximum rows of one repetition: first for batches, then for epochs.
MAX_ROUND_ROWS = (16, 64)
# Repetitions with different costs are shown as up to this many rows; beyond, as one.
MAX_GROUPS_OF_ROUNDS = 8
SAME_COST_SHARE = 1 / 500  # Fraction of the run's peak by which repetitions of the same cost may differ.
# Fields of a stage whose maximum is shown for merged stages.
_MAXIMUM_FIELDS = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes", "resident_bytes", "measured_peak_bytes",
    "measured_reserved_bytes", "device_used_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownStage(Stage):
    """One row of the stage table: a stage, or several merged stages."""

    num_merged: int = 1  # Merged layers or steps; `delta_bytes` is their sum.
    num_rounds: int = 1  # Repetitions of the row together with others; `delta_bytes` is that of the last one.
    is_step: bool = False  # Whether the row is a whole step.
    has_equal_deltas: bool = True  # Whether the merged stages have the same `delta_bytes`, to 2% of their mean.


def choose_full_step(document: Report) -> int:
    """Return the number of the step shown in full: the one with the highest peak, the last if several have it."""
    return max(document.stages, key=lambda row: (row.peak_allocated_bytes, row.step)).step


def fold_stages(document: Report) -> list[ShownStage]:
    """Return the rows of the stage table."""
    full = choose_full_step(document)
    result: list[ShownStage] = []
    for step, rows in groupby(document.stages, key=lambda row: row.step):
        if step in (0, full):
            result += _fold_step(list(rows))
        else:
            result.append(_merge_stages(list(rows), name=f"step {step} (total)", is_step=True))
    for max_rows in MAX_ROUND_ROWS:
        result = list(_fold_repetitions(result, round(SAME_COST_SHARE * document.peak.allocated_bytes), max_rows))
    return result


def find_peak_row(document: Report, rows: Sequence[ShownStage]) -> int | None:
    """Return the index of the row with the run's peak; rows of the peak's stage have priority over equal ones."""
    peak = document.peak
    reached = [place for place, row in enumerate(rows) if row.peak_allocated_bytes == peak.allocated_bytes]
    stacks = {row.stack for row in document.stages if row.name == peak.stage and row.stack}
    own = [place for place in reached if rows[place].name == peak.stage or rows[place].stack in stacks]
    return max(own or reached, default=None)


def _fold_step(rows: list[Stage]) -> Iterator[ShownStage]:
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
            yield from _fold_summaries(summaries)
            summaries = []
            yield from _fold_layers(members)
        else:
            summaries.append(_merge_stages(members, name=f"{word} {micro_batch}"))
    yield from _fold_summaries(summaries)


def _fold_summaries(summaries: list[ShownStage]) -> Iterator[ShownStage]:
    """Yield one row for successive micro-batches with the same change of allocated bytes."""
    for _, group in groupby(summaries, key=lambda row: row.delta_bytes):
        alike = list(group)
        word, first = alike[0].name.split()
        name = alike[0].name if len(alike) == 1 else f"{word}es {first}-{alike[-1].name.split()[1]}"
        yield _merge_stages(alike, name=name)


def _fold_repetitions(rows: list[ShownStage], tolerance_bytes: int, max_rows: int) -> Iterator[ShownStage]:
    """Yield rows with repetitions of up to `max_rows` rows merged if their bytes differ by up to `tolerance_bytes`."""

    def have_same_name(first: ShownStage, second: ShownStage) -> bool:
        return first.name == second.name or (first.is_step and second.is_step)

    def have_same_cost(first: list[ShownStage], second: list[ShownStage]) -> bool:
        return all(
            abs(a.delta_bytes - b.delta_bytes) <= tolerance_bytes
            and abs(_peak_above_start(a) - _peak_above_start(b)) <= tolerance_bytes
            for a, b in zip(first, second, strict=True)
        )

    for rounds in _find_rounds(rows, have_same_name, max_rows):
        # Two models whose rows have the same names may take turns: rounds of rounds.
        groups = list(_find_rounds(rounds, have_same_cost, max_rows))
        if len(groups) > MAX_GROUPS_OF_ROUNDS:
            groups = [[[members] for members in rounds]]
        for group in groups:
            yield from _fold_rounds([[row for members in turn for row in members] for turn in group])


def _peak_above_start(row: ShownStage) -> int:
    """Return the peak of a row minus the bytes allocated before the row."""
    return row.peak_allocated_bytes - (row.allocated_bytes - row.delta_bytes)


def _find_rounds(items: Sequence[T], is_same: Callable[[T, T], bool], max_rows: int) -> Iterator[list[list[T]]]:
    """Yield groups of equal successive rounds of up to `max_rows` items; an item that does not repeat is one round."""
    begin = 0
    while begin < len(items):
        period, count = 1, 1
        for length in range(1, min(max_rows, (len(items) - begin) // 2) + 1):
            end = begin + length
            while end < len(items) and is_same(items[begin + (end - begin) % length], items[end]):
                end += 1
            times = (end - begin) // length
            if times > 1 and times * length > count * period:
                period, count = length, times
        end = begin + period * count
        yield [list(items[first : first + period]) for first in range(begin, end, period)]
        begin = end


def _fold_rounds(rounds: list[list[ShownStage]]) -> Iterator[ShownStage]:
    """Yield the rows of one round, each merged with the rows at the same position of the other rounds."""
    alone = len(rounds[0]) == 1
    for rows in zip(*rounds, strict=True):
        first, last = rows[0], rows[-1]
        several = first.is_step and len(rows) > 1
        begin, end = (re.findall(r"\d+", row.name) if several else [] for row in (first, last))
        name = f"steps {begin[0]}-{end[-1]} (total)" if several else first.name
        turns = {"delta_bytes": last.delta_bytes, "num_rounds": sum(row.num_rounds for row in rows)}
        yield _merge_stages(
            rows, name=name, **({"num_merged": sum(row.num_merged for row in rows)} if alone else turns)
        )


def _fold_layers(rows: list[Stage]) -> Iterator[ShownStage]:
    for stack, group in groupby(rows, key=lambda row: row.stack):
        members = list(group)
        if not stack:
            yield from (_merge_stages([row]) for row in members)
            continue
        runs = [list(run) for _, run in groupby(members, key=_requested_by_layer)]
        if len(runs) > MAX_ROWS_PER_STACK:
            runs = [members]
        for run in runs:
            prefix = run[0].name.rpartition(" ")[0]
            name = run[0].name if len(run) == 1 else f"{prefix}s {run[0].index}-{run[-1].index}"
            yield _merge_stages(run, name=name, num_merged=len(run))


def _requested_by_layer(row: Stage) -> tuple[int, int]:
    """Return the bytes that a layer requests; allocated bytes would also depend on the free blocks at that time."""
    return row.requested_delta_bytes, row.peak_requested_bytes - row.requested_bytes


def _merge_stages(rows: Sequence[Stage], **changes: Any) -> ShownStage:
    """Return successive stages as one row: values of the last stage, except for sums, maximums and `changes`."""
    amounts = {field.name: getattr(rows[-1], field.name) for field in fields(rows[-1])}
    for name in _MAXIMUM_FIELDS:
        amounts[name] = max((getattr(row, name) for row in rows if getattr(row, name) is not None), default=None)
    seconds = [row.seconds for row in rows if row.seconds is not None]
    amounts["seconds"] = sum(seconds) if seconds else None
    deltas = [row.delta_bytes for row in rows]
    amounts["delta_bytes"] = sum(deltas)
    alike = 50 * (max(deltas) - min(deltas)) <= abs(sum(deltas)) / len(deltas)
    amounts["has_equal_deltas"] = alike and all(row.has_equal_deltas for row in rows if isinstance(row, ShownStage))
    amounts["oom"] = any(row.oom for row in rows)
    return ShownStage(**amounts | changes)
