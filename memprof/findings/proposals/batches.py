"""How many rows of a batch fit at a time."""

from __future__ import annotations

from collections.abc import Collection

from memprof.findings.finding import Context


def find_fitting_rows(context: Context, storages: Collection[int], num_rows: int) -> int:
    """Return the rows at a time, of `num_rows`, with which the run fits if `storages` shrink in proportion: half of
    them, or the first fraction 1/2^n that fits; 1 if none does.

    Of a run that ended without memory the rest is unknown: what is known must fit half of the GPU.
    """
    ledger, usable_bytes, lifetimes = context.ledger, context.usable_bytes, context.lifetimes
    if usable_bytes is not None and ledger.trace.ended_out_of_memory:
        usable_bytes //= 2
    rows = num_rows
    while rows > 1:
        rows //= 2
        saved_bytes = lifetimes.peak_reduction(lifetimes.savings(storages, 1 - rows / num_rows))
        needed_bytes = (ledger.peak_bytes - saved_bytes) * ledger.run.required_reserved_bytes // ledger.peak_bytes
        if usable_bytes is None or needed_bytes <= usable_bytes:
            break
    return rows
