"""What a run would need if storages were freed after their last use: the allocator is replayed with these frees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memprof.allocator import MemoryNeeds, compute_memory_needs
from memprof.findings.finding import Context, Evidence
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import NONE, Trace
from memprof.units import format_bytes

MIN_CAUSE_SHARE = 0.02  # of the peak or of what is reserved, where memory ended the run


def compute_needs_without(context: Context, storages: Iterable[int]) -> MemoryNeeds:
    """Return what the run needs if each of `storages` is freed after its last use, or, never used, once allocated."""
    births = context.lifetimes.births
    last_uses = context.ledger.trace.last_uses or [NONE] * len(births)
    return compute_needs_with_frees(
        context, {index: births[index] + 1 if last_uses[index] == NONE else last_uses[index] for index in storages}
    )


def compute_needs_with_frees(context: Context, frees: Mapping[int, int]) -> MemoryNeeds:
    """Return what the run needs if each storage in `frees` is freed at the event there, which is before it is freed."""
    return compute_needs_of(context, free_earlier(context.ledger.trace, frees))


def compute_needs_of(context: Context, changed: Trace) -> MemoryNeeds:
    """Return what `changed`, the trace of the run with a change, needs on the run's GPU with its settings."""
    run = context.ledger.run
    return compute_memory_needs(changed, run.gpu, run.config, run.release)


def is_decisive(context: Context, needs: MemoryNeeds | None) -> bool:
    """Return whether the run does not fit, and would with `needs`, of `compute_needs_without`.

    Of a run that memory ended, what is small lets one more allocation succeed, and is no cause: MIN_CAUSE_SHARE.
    """
    ledger = context.ledger
    if needs is None or not needs.fits or ledger.run.fits:
        return False
    allocated_share = needs.allocated_bytes / ledger.peak_bytes
    reserved_share = needs.required_reserved_bytes / ledger.run.required_reserved_bytes
    saves_enough = min(allocated_share, reserved_share) <= 1 - MIN_CAUSE_SHARE
    return saves_enough or not ledger.trace.ended_out_of_memory


def has_host_memory(context: Context) -> bool:
    """Return whether the host has memory of its own, so that what is moved there leaves room on the GPU."""
    return context.ledger.trace.facts.device.unified_bytes is None


def name_other_place(context: Context) -> str:
    """Return where tensors take nothing of the GPU's memory, as words."""
    return "in host memory" if has_host_memory(context) else "in a file"


def effect_evidence(context: Context, needs: MemoryNeeds, change: str = "freed after its last use") -> Evidence:
    """Return evidence that compares `needs`, of `compute_needs_without` or with another `change`, with what the run
    needs."""
    ledger = context.ledger
    before, after = ledger.run.required_reserved_bytes, needs.required_reserved_bytes
    text = (
        f"{change}, the run allocates at most {format_bytes(needs.allocated_bytes)} instead of "
        f"{format_bytes(ledger.peak_bytes)}, and {format_reserved(needs, before)}"
    )
    return Evidence(text, num_bytes=before - after, required_bytes=after)


def format_reserved(needs: MemoryNeeds, before_bytes: int) -> str:
    """Return text that compares what is reserved with `needs` and with `before_bytes`; where that is more than the GPU
    has, though the run fits, the text says why."""
    text = f"reserves {format_bytes(needs.required_reserved_bytes)} instead of {format_bytes(before_bytes)}"
    return f"{text}, of which cached segments are released when the GPU is full" if needs.releases_cache else text
