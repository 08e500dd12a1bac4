"""How many rows of a batch fit at a time."""

from __future__ import annotations

from collections.abc import Collection

from memprof.findings.finding import Context


def find_fitting_rows(context: Context, storages: Collection[int], num_rows: int) -> int:
    """Return the rows at a time, of `num_rows`, with which the run fits if `storages` shrink in proportion: half of
    them, or the first fraction 1/2^n that fits; 1 if none does.

    Of a run that ended without memory the rest is unknown: what is known should fit half of the GPU, if it can.
    """
    usable_bytes = context.usable_bytes
    if usable_bytes is None:
        return max(num_rows // 2, 1)
    is_cut = context.ledger.trace.ended_out_of_memory
    for limit_bytes in (usable_bytes // 2, usable_bytes) if is_cut else (usable_bytes,):
        rows = num_rows
        while rows > 1:
            rows //= 2
            if _estimate_need(context, storages, rows / num_rows) <= limit_bytes:
                return rows
    return 1


def _estimate_need(context: Context, storages: Collection[int], share: float) -> int:
    """Return what the run reserves if `storages` have a `share` of their sizes, and segments waste what they do now."""
    ledger, lifetimes = context.ledger, context.lifetimes
    saved_bytes = lifetimes.peak_reduction(lifetimes.savings(storages, 1 - share))
    return (ledger.peak_bytes - saved_bytes) * ledger.run.required_reserved_bytes // ledger.peak_bytes
