"""Proposes a product with each half of joined features, where those of all pairs are joined: attention of graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize

MIN_ITEMS = 64  # of which all pairs are joined: fewer may be a size of the model


@proposes(53)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the line that joins the most, of results with a row for each pair of n items: n * n rows, of
    two repeated tensors. Of all such rows a product by broadcasting has one number each."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    joined = [index for index, one in enumerate(trace.storages) if trace.op(one) == "aten.cat" and not one.hidden]
    largest = max(joined, key=lambda index: trace.storages[index].num_bytes, default=None)
    if largest is None:
        return
    storage = trace.storages[largest]
    num_pairs, width = math.prod(storage.shape[:-1]), storage.shape[-1] if storage.shape else 0
    num_items = math.isqrt(num_pairs)
    if num_items < MIN_ITEMS or num_items * num_items != num_pairs:
        return
    wide = [
        index
        for index, one in enumerate(trace.storages)
        if len(one.shape) > 1 and math.prod(one.shape[:-1]) == num_pairs and index not in trace.owners
    ]
    live = lifetimes.find_live(lifetimes.births[largest], range(largest)).storages
    halves = [index for index in wide if index in live and 2 * trace.storages[index].shape[-1] == width]
    has_items = any(num_items in trace.storages[index].shape[:-1] for index in live)
    if len(halves) < 2 or not has_items:
        return
    sizes = {index: trace.storages[index].num_bytes // trace.storages[index].shape[-1] for index in wide}
    line = trace.source_line(storage)
    change = (
        f"multiply each half of the features on its own, and add the products by broadcasting ([{num_items}, 1] + "
        f"[1, {num_items}]), instead of joining the features of all pairs: {format_shape(storage.shape)} at "
        f"{file_and_line(line)}"
    )
    yield Proposal(resize(trace, sizes), change, source=line)
