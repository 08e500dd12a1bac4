"""Proposes products of some rows, where those of all rows of two tables, such as users and items, are made."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape, param_names
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize

MIN_ROWS = 1024  # of each table: smaller ones are layers
_PRODUCTS = ("aten.mm", "aten.addmm")


@proposes(54)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if the largest tensor at the peak is the product [n, m] of parameters [n, k] and [m, k]."""
    trace = context.ledger.trace
    storage = trace.storages[context.lifetimes.find_largest_at_peak()]
    if trace.op(storage) not in _PRODUCTS or len(storage.shape) != 2 or min(storage.shape) < MIN_ROWS:
        return
    shapes = [trace.storages[index].shape for index in param_names(trace)]
    widths = [{shape[1] for shape in shapes if len(shape) == 2 and shape[0] == rows} for rows in storage.shape]
    if not widths[0] & widths[1]:
        return
    alike = [index for index, one in enumerate(trace.storages) if one.shape == storage.shape]
    line = trace.source_line(storage)
    change = (
        "multiply the rows that the loss takes, (x[rows] * y[columns]).sum(-1), not all with all: "
        f"{format_shape(storage.shape)} at {file_and_line(line)}"
    )
    yield Proposal(resize(trace, dict.fromkeys(alike, 0)), change, source=line)
