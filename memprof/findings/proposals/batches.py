"""How many rows of a batch fit at a time."""

from __future__ import annotations

from collections.abc import Collection

from memprof.allocator import GpuMemory, compute_memory_needs
from memprof.findings.finding import Context
from memprof.ledger.what_if import resize
from memprof.trace.events import Trace


def find_fitting_rows(context: Context, storages: Collection[int], num_rows: int) -> int:
    """Return the rows at a time, of `num_rows`, with which the run fits if `storages` shrink in proportion: half of
    them, or the first fraction 1/2^n that fits; 1 if none does.

    Of a run that ended without memory the rest is unknown: what is known should leave half of the room that the
    storages have, if it can.
    """
    usable_bytes = context.usable_bytes
    if usable_bytes is None:
        return max(num_rows // 2, 1)
    lifetimes, limits = context.lifetimes, [usable_bytes]
    if context.ledger.trace.ended_out_of_memory:
        other_bytes = context.ledger.peak_bytes - lifetimes.peak_reduction(lifetimes.savings(storages))
        limits.insert(0, (usable_bytes + min(other_bytes, usable_bytes)) // 2)
    for limit_bytes in limits:
        rows = num_rows
        while rows > 1:
            rows //= 2
            if _fits(context, storages, rows, num_rows, limit_bytes):
                return rows
    return 1


def resize_rows(trace: Trace, storages: Collection[int], rows: int, num_rows: int) -> Trace:
    """Return `trace` where `storages`, which have `num_rows` rows, have `rows`; bytes are rounded up."""
    return resize(trace, {index: -(-trace.storages[index].num_bytes * rows // num_rows) for index in storages})


def _fits(context: Context, storages: Collection[int], rows: int, num_rows: int, limit_bytes: int) -> bool:
    """Return whether the run fits in `limit_bytes` if `storages` have `rows` of their `num_rows` rows, by a replay;
    there is none if what is allocated is more already."""
    lifetimes = context.lifetimes
    saved_bytes = lifetimes.peak_reduction(lifetimes.savings(storages, 1 - rows / num_rows))
    if context.ledger.peak_bytes - saved_bytes > limit_bytes:
        return False
    run, changed = context.ledger.run, resize_rows(context.ledger.trace, storages, rows, num_rows)
    return compute_memory_needs(changed, GpuMemory(limit_bytes, 0), run.config, run.release).fits
