"""Finding `ranks-differ`: ranks of one program have very different peaks, and all need the GPU of the highest one.

flows/rank_reports.py calls this module for the reports of several ranks; it is not a rule on a single run.
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
MIN_SHARE = 0.05  # of the highest peak, which must exceed the mean over ranks by this share and by MIN_BYTES

MAX_SHOWN = 3  # categories in the evidence, and groups of equal tensors


class RankPeak(NamedTuple):
    """Memory of a rank at the rank's peak: total bytes, bytes per category, and live tensors."""

    allocated_bytes: int
    categories: Mapping[str, int]
    tensors: Sequence[LiveTensor]


def find_differing_ranks(peaks: Mapping[int, RankPeak]) -> list[Finding]:
    """Return at most one finding for `peaks` (rank -> peak); `num_bytes` is the highest peak minus the mean."""
    if len(peaks) < 2:
        return []
    top_rank = max(peaks, key=lambda rank: peaks[rank].allocated_bytes)
    low_rank = min(peaks, key=lambda rank: peaks[rank].allocated_bytes)
    top, low = peaks[top_rank], peaks[low_rank]
    mean_bytes = sum(peak.allocated_bytes for peak in peaks.values()) // len(peaks)
    excess_bytes = top.allocated_bytes - mean_bytes
    if excess_bytes < MIN_BYTES or excess_bytes < MIN_SHARE * top.allocated_bytes:
        return []
    title = (
        f"Ranks differ: rank {top_rank} takes {format_bytes(top.allocated_bytes)} at its peak, rank {low_rank} "
        f"{format_bytes(low.allocated_bytes)}; evenly spread each takes {format_bytes(mean_bytes)}, "
        f"{percent(excess_bytes, top.allocated_bytes)} less than the rank with the highest need"
    )
    surplus = _find_surplus_tensors(top, low)
    line = next((tensor.source for tensor, _ in surplus if tensor.source is not None), None)
    location = "" if line is None else f" at {file_and_line(line)}"
    lines = (
        Evidence(f"fix{location}: give rank {low_rank} a part of what rank {top_rank} has there", source=line),
        *(_make_category_evidence(name, top, low, top_rank, low_rank) for name in _sort_by_difference(top, low)),
        *(_make_tensor_evidence(tensor, num_bytes, top_rank) for tensor, num_bytes in surplus[:MAX_SHOWN]),
    )
    return [Finding("ranks-differ", Severity.WARNING, title, excess_bytes, lines, ())]


def _sort_by_difference(top: RankPeak, low: RankPeak) -> list[str]:
    excess = {name: num_bytes - low.categories.get(name, 0) for name, num_bytes in top.categories.items()}
    return [name for name in sorted(excess, key=lambda name: -excess[name])[:MAX_SHOWN] if excess[name] > 0]


def _make_category_evidence(name: str, top: RankPeak, low: RankPeak, top_rank: int, low_rank: int) -> Evidence:
    highest_bytes, lowest_bytes = top.categories[name], low.categories.get(name, 0)
    text = f"{name}: {format_bytes(highest_bytes)} on rank {top_rank}, {format_bytes(lowest_bytes)} on rank {low_rank}"
    return Evidence(text, num_bytes=highest_bytes - lowest_bytes)


def _find_surplus_tensors(top: RankPeak, low: RankPeak) -> list[tuple[LiveTensor, int]]:
    """Return the tensors of which rank `top` has more bytes than rank `low`, each with the excess bytes, most first."""
    lowest_bytes = Counter[tuple[object, ...]]()
    for tensor in low.tensors:
        lowest_bytes[_make_tensor_key(tensor)] += tensor.allocated_bytes
    surplus = [(tensor, tensor.allocated_bytes - lowest_bytes[_make_tensor_key(tensor)]) for tensor in top.tensors]
    return sorted((pair for pair in surplus if pair[1] > 0), key=lambda pair: -pair[1])


def _make_tensor_key(tensor: LiveTensor) -> tuple[object, ...]:
    return tensor.category, tensor.shape, tensor.dtype, tensor.op, tensor.source


def _make_tensor_evidence(tensor: LiveTensor, num_bytes: int, rank: int) -> Evidence:
    text = (
        f"{tensor.count} x {format_shape(tensor.shape)} {tensor.dtype}, {tensor.category}, by {tensor.op} at "
        f"{file_and_line(tensor.source)}: {format_bytes(num_bytes)} more on rank {rank}"
    )
    return live_evidence(tensor, text, num_bytes=num_bytes)
