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
from memprof.report.terminal.stage_names import describe_step, find_last_step

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
    """One row of the stage table: a stage, or several stages merged."""

    num_merged: int = 1  # Merged layers or steps; `delta_bytes` is their sum.
    num_rounds: int = 1  # Repetitions of the row together with others; `delta_bytes` is that of the last one.
    is_step: bool = False  # Whether the row is a whole step.
    has_equal_deltas: bool = True  # Whether the merged stages have the same `delta_bytes`, to 2% of their mean.


def choose_full_step(document: Report) -> int:
    """Return the number of the step that is shown in full: the last of those with the highest peak."""
    return max(document.stages, key=lambda row: (row.peak_allocated_bytes, row.step)).step


def fold_stages(document: Report) -> list[ShownStage]:
    """Return the rows of a report's stage table, with equal layers and repeated steps merged."""
    full_step = choose_full_step(document)
    last_step = find_last_step(document)
    result: list[ShownStage] = []
    for step, rows in groupby(document.stages, key=lambda row: row.step):
        if step in (0, full_step):
            result += _fold_step(list(rows))
        else:
            name = f"all of {describe_step(document, step)}" if step <= last_step else "after the last step"
            result.append(_merge_stages(list(rows), name=name, is_step=step <= last_step))
    for max_rows in MAX_ROUND_ROWS:
        result = list(_fold_repetitions(result, round(SAME_COST_SHARE * document.peak.allocated_bytes), max_rows))
    return result


def find_peak_row(document: Report, rows: Sequence[ShownStage]) -> int | None:
    """Return the index of the row with the run's peak: of rows with equal peaks, one of the peak's stage."""
    peak = document.peak
    indices = [i for i, row in enumerate(rows) if row.peak_allocated_bytes == peak.allocated_bytes]
    stacks = {row.stack for row in document.stages if row.name == peak.stage and row.stack}
    own_indices = [i for i in indices if rows[i].name == peak.stage or rows[i].stack in stacks]
    return max(own_indices or indices, default=None)


def _fold_step(rows: list[Stage]) -> Iterator[ShownStage]:
    peaks = ((row.peak_allocated_bytes, row.micro_batch) for row in rows if row.micro_batch)
    full_micro_batch = max(peaks, default=(0, 0))[1]
    # What lies between two micro-batches goes with the first.
    owners = list(accumulate(rows, lambda last, row: last if row.name == "other" else row.micro_batch, initial=0))[1:]
    steps = [i for i, row in enumerate(rows) if row.name == "optimizer step"]
    # Where an optimizer steps between them (a GAN's), they are no micro-batches.
    prefix = "forward-backward pass" if steps and any(owners[steps[0] :]) else "micro-batch"
    summaries: list[ShownStage] = []
    for micro_batch, group in groupby(zip(owners, rows, strict=True), key=lambda pair: pair[0]):
        members = [row for _, row in group]
        if micro_batch in (0, full_micro_batch):
            yield from _fold_summaries(summaries)
            summaries = []
            yield from _fold_layers(members)
        else:
            summaries.append(_merge_stages(members, name=f"{prefix} {micro_batch}"))
    yield from _fold_summaries(summaries)


def _fold_summaries(summaries: list[ShownStage]) -> Iterator[ShownStage]:
    """Yield rows of micro-batches; successive ones with the same change of allocated bytes are merged into one row."""
    for _, group in groupby(summaries, key=lambda row: row.delta_bytes):
        equal_rows = list(group)
        prefix, _, first = equal_rows[0].name.rpartition(" ")
        name = equal_rows[0].name if len(equal_rows) == 1 else f"{prefix}es {first}-{equal_rows[-1].name.split()[-1]}"
        yield _merge_stages(equal_rows, name=name)


def _fold_repetitions(rows: list[ShownStage], tolerance_bytes: int, max_rows: int) -> Iterator[ShownStage]:
    """Yield `rows`, merging repeated groups of up to `max_rows` rows whose bytes differ by up to `tolerance_bytes`."""

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
            yield from _fold_rounds([[row for members in repetition for row in members] for repetition in group])


def _peak_above_start(row: ShownStage) -> int:
    """Return the peak bytes of a row minus the bytes that are allocated when its first stage begins."""
    return row.peak_allocated_bytes - (row.allocated_bytes - row.delta_bytes)


def _find_rounds(items: Sequence[T], is_same: Callable[[T, T], bool], max_rows: int) -> Iterator[list[list[T]]]:
    """Yield groups of successive equal sublists of up to `max_rows` items; an item that does not repeat is alone."""
    begin = 0
    while begin < len(items):
        period, count = 1, 1
        for length in range(1, min(max_rows, (len(items) - begin) // 2) + 1):
            end = begin + length
            while end < len(items) and is_same(items[begin + (end - begin) % length], items[end]):
                end += 1
            num_times = (end - begin) // length
            if num_times > 1 and num_times * length > count * period:
                period, count = length, num_times
        end = begin + period * count
        yield [list(items[first : first + period]) for first in range(begin, end, period)]
        begin = end


def _fold_rounds(rounds: list[list[ShownStage]]) -> Iterator[ShownStage]:
    """Yield the rows of one repetition, each merged with the rows at its position in the other repetitions."""
    is_single_row = len(rounds[0]) == 1
    for rows in zip(*rounds, strict=True):
        first, last = rows[0], rows[-1]
        is_step_range = first.is_step and len(rows) > 1
        name = f"steps {_format_numbers(rows, are_successive=is_single_row)}" if is_step_range else first.name
        round_changes = {"delta_bytes": last.delta_bytes, "num_rounds": sum(row.num_rounds for row in rows)}
        yield _merge_stages(
            rows, name=name, **({"num_merged": sum(row.num_merged for row in rows)} if is_single_row else round_changes)
        )


def _format_numbers(rows: Sequence[ShownStage], *, are_successive: bool) -> str:
    """Return the numbers of the steps in `rows`: `4-7` if they are successive, else `4, 7, 10` or `4, 7 ... 31`."""
    numbers = [re.findall(r"\d+", row.name) for row in rows]
    if are_successive or any(len(members) > 1 for members in numbers):
        return f"{numbers[0][0]}-{numbers[-1][-1]}"
    firsts = [members[0] for members in numbers]
    return ", ".join(firsts) if len(firsts) < 4 else f"{firsts[0]}, {firsts[1]} ... {firsts[-1]}"


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
    """Return the change and the peak of a layer's requested bytes (allocated bytes also depend on free blocks)."""
    return row.requested_delta_bytes, row.peak_requested_bytes - row.requested_bytes


def _merge_stages(rows: Sequence[Stage], **changes: Any) -> ShownStage:
    """Return stages as one row: summed deltas and seconds, maximum peaks, else the last stage's values or `changes`."""
    amounts = {field.name: getattr(rows[-1], field.name) for field in fields(rows[-1])}
    for name in _MAXIMUM_FIELDS:
        amounts[name] = max((getattr(row, name) for row in rows if getattr(row, name) is not None), default=None)
    seconds = [row.seconds for row in rows if row.seconds is not None]
    amounts["seconds"] = sum(seconds) if seconds else None
    deltas = [row.delta_bytes for row in rows]
    amounts["delta_bytes"] = sum(deltas)
    are_equal = 50 * (max(deltas) - min(deltas)) <= abs(sum(deltas)) / len(deltas)
    amounts["has_equal_deltas"] = are_equal and all(row.has_equal_deltas for row in rows if isinstance(row, ShownStage))
    highest = max(rows, key=lambda row: row.peak_allocated_bytes)
    amounts["source"] = highest.source if changes.get("name", highest.name) == highest.name else None
    amounts["oom"] = any(row.oom for row in rows)
    return ShownStage(**amounts | changes)
