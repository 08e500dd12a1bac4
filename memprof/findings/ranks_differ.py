"""Ranks of one program with very different peaks: the rank with the highest need decides which GPU is large enough.

flows/rank_reports.py calls this module, which is no rule on one run, for the reports of several ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memprof.findings.evidence import file_and_line, format_shape, live_evidence, percent
from memprof.findings.finding import Evidence, Finding, Severity
from memprof.ledger.ledger import LiveTensor
from memprof.units import MIB, format_bytes

MIN_BYTES = 256 * MIB
MIN_SHARE = 0.05  # found when the fullest rank takes more than the mean of all by both, the latter of what it takes

MAX_SHOWN = 3  # categories, and kinds of tensors, in the evidence


class RankPeak(NamedTuple):
    """A rank's memory at its peak."""

    allocated_bytes: int
    categories: Mapping[str, int]
    tensors: Sequence[LiveTensor]


def find_differing_ranks(peaks: Mapping[int, RankPeak]) -> list[Finding]:
    """Return a finding for unequal ranks; `num_bytes` is the excess of the rank with the highest need over the mean."""
    if len(peaks) < 2:
        return []
    fullest = max(peaks, key=lambda rank: peaks[rank].allocated_bytes)
    leanest = min(peaks, key=lambda rank: peaks[rank].allocated_bytes)
    most, least = peaks[fullest], peaks[leanest]
    mean = sum(peak.allocated_bytes for peak in peaks.values()) // len(peaks)
    beyond = most.allocated_bytes - mean
    if beyond < MIN_BYTES or beyond < MIN_SHARE * most.allocated_bytes:
        return []
    title = (
        f"Ranks differ: rank {fullest} takes {format_bytes(most.allocated_bytes)} at its peak, rank {leanest} "
        f"{format_bytes(least.allocated_bytes)}; evenly spread each takes {format_bytes(mean)}, "
        f"{percent(beyond, most.allocated_bytes)} less than the rank with the highest need"
    )
    own = _find_surplus_tensors(most, least)
    line = next((tensor.source for tensor, _ in own if tensor.source is not None), None)
    where = "" if line is None else f" at {file_and_line(line)}"
    lines = (
        Evidence(f"fix{where}: give rank {leanest} a part of what rank {fullest} has there", source=line),
        *(_make_category_evidence(name, most, least, fullest, leanest) for name in _sort_by_difference(most, least)),
        *(_make_tensor_evidence(tensor, num_bytes, fullest) for tensor, num_bytes in own[:MAX_SHOWN]),
    )
    return [Finding("ranks-differ", Severity.WARNING, title, beyond, lines, ())]


def _sort_by_difference(most: RankPeak, least: RankPeak) -> list[str]:
    more = {name: num_bytes - least.categories.get(name, 0) for name, num_bytes in most.categories.items()}
    return [name for name in sorted(more, key=lambda name: -more[name])[:MAX_SHOWN] if more[name] > 0]


def _make_category_evidence(name: str, most: RankPeak, least: RankPeak, fullest: int, leanest: int) -> Evidence:
    own, other = most.categories[name], least.categories.get(name, 0)
    text = f"{name}: {format_bytes(own)} on rank {fullest}, {format_bytes(other)} on rank {leanest}"
    return Evidence(text, num_bytes=own - other)


def _find_surplus_tensors(most: RankPeak, least: RankPeak) -> list[tuple[LiveTensor, int]]:
    """Return the kinds of tensors of which `find_max_live` has more than `least`, with the excess bytes, largest first."""
    there = Counter[tuple[object, ...]]()
    for tensor in least.tensors:
        there[_make_tensor_key(tensor)] += tensor.allocated_bytes
    more = [(tensor, tensor.allocated_bytes - there[_make_tensor_key(tensor)]) for tensor in most.tensors]
    return sorted((one for one in more if one[1] > 0), key=lambda one: -one[1])


def _make_tensor_key(tensor: LiveTensor) -> tuple[object, ...]:
    return tensor.category, tensor.shape, tensor.dtype, tensor.op, tensor.source


def _make_tensor_evidence(tensor: LiveTensor, num_bytes: int, rank: int) -> Evidence:
    text = (
        f"{tensor.count} x {format_shape(tensor.shape)} {tensor.dtype}, {tensor.category}, by {tensor.op} at "
        f"{file_and_line(tensor.source)}: {format_bytes(num_bytes)} more on rank {rank}"
    )
    return live_evidence(tensor, text, num_bytes=num_bytes)
