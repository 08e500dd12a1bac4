"""What is in the way of a run."""

from __future__ import annotations

from memprof.ledger.categories import Category
from memprof.report.documents.ladder import Bottleneck
from memprof.report.documents.report import Document
from memprof.units import format_bytes


def bottleneck_of(document: Document) -> Bottleneck:
    """What is in the way of this run: where it dies if it does, and what most of the memory there is for."""
    verdict, peak = document.verdict, document.peak
    largest = next(iter(peak.categories))
    size = peak.categories[largest]
    if document.failure is not None:
        text = f"fails in {document.failure.phase}"
        return Bottleneck(peak.stage, peak.step, largest, peak.allocated_bytes, text)
    if any(finding.id == "device-mismatch" for finding in document.findings):
        return Bottleneck(peak.stage, peak.step, largest, size, "stops where tensors of two devices meet")
    if verdict.fits:
        text = f"{largest}, {format_bytes(size)} ({size / peak.allocated_bytes:.0%} of the peak), in {peak.stage}"
        return Bottleneck(peak.stage, peak.step, largest, size, text)
    tried = verdict.tried_to_allocate_bytes or 0
    stage = f"{verdict.oom_stage}" + (f" of step {verdict.oom_step}" if verdict.oom_step else "")
    if peak.allocated_bytes <= (document.device.usable_bytes or 0):
        # All tensors together would fit: it is the pieces in between that do not.
        wasted = (verdict.reserved_bytes or 0) - (verdict.in_use_bytes or 0)
        text = f"dies in {stage}: {format_bytes(tried)} asked, {format_bytes(wasted)} reserved in pieces too small"
        return Bottleneck(verdict.oom_stage or "", verdict.oom_step or 0, Category.FRAGMENTATION.value, wasted, text)
    text = f"dies in {stage}: {format_bytes(tried)} asked; at the peak {largest}, {format_bytes(size)}"
    return Bottleneck(verdict.oom_stage or "", verdict.oom_step or 0, largest, size, text)
