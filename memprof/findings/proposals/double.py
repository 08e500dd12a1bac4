"""Proposes float32 for tensors in float64, which is what arrays of numpy are made in."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize

MIN_SHARE = 0.25  # of the peak: where float64 takes less, it is not what fills the GPU


@proposes(55)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change of all tensors in float64; it names the largest at the peak."""
    trace, at_peak = context.ledger.trace, context.lifetimes.at_peak
    doubles = {index for index, storage in enumerate(trace.storages) if storage.dtype == "float64"}
    live = at_peak & doubles
    if context.spec is not None or not live:
        return
    if context.lifetimes.sum_bytes(live) < MIN_SHARE * context.ledger.peak_bytes:
        return
    largest = trace.storages[max(live, key=lambda index: (trace.storages[index].num_bytes, -index))]
    place = f"{format_shape(largest.shape)} at {file_and_line(trace.source_line(largest))}"
    change = f"use float32 instead of float64 where 7 digits are enough (numpy: .astype(numpy.float32)): {place}"
    yield Proposal(
        resize(trace, {index: trace.storages[index].num_bytes // 2 for index in doubles}),
        change,
        source=trace.source_line(largest),
    )
