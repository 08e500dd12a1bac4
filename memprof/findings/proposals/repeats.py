"""Proposes expand() for repeat() along dimensions of one element: a view that takes no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize


@proposes(41)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the line that repeats the most at the peak."""
    trace, at_peak = context.ledger.trace, context.lifetimes.at_peak
    sizes: Counter[int] = Counter()
    for index in trace.repeats:
        sizes[trace.storages[index].source] += trace.storages[index].num_bytes * (index in at_peak)
    if not sizes or not sizes.total():
        return
    source = sizes.most_common(1)[0][0]
    repeated = [index for index in trace.repeats if trace.storages[index].source == source]
    line = trace.source_at(source)
    place = file_and_line(line)
    shape = format_shape(trace.storages[repeated[-1]].shape)
    change = (
        f"use expand() instead of repeat() at {place}, or no copy at all where the next operator broadcasts: {shape} "
        "repeats one tensor, and a view takes no memory, unless it is written to or reshaped"
    )
    yield Proposal(resize(trace, dict.fromkeys(repeated, 0)), change, source=line)
