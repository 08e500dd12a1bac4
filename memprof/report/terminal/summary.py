"""A summary of a report in a few lines, for the message of a failed test."""

from __future__ import annotations

from memprof.ledger.ledger import LiveTensor
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import format_shape
from memprof.report.terminal.stage_names import describe_moment
from memprof.report.terminal.tensors import merge_equal_tensors
from memprof.report.terminal.verdict import describe_added_memory
from memprof.trace.events import FailureKind, short_source
from memprof.units import format_bytes

MAX_TENSORS = 3


def format_summary(document: Report) -> str:
    """Return verdict, peak and its stage, largest tensors, and the titles of findings, one line each."""
    peak, verdict = document.peak, document.verdict
    allocated, reserved = (format_bytes(size) for size in (peak.allocated_bytes, peak.reserved_bytes))
    allocated_at = describe_moment(document, peak.stage, peak.step)
    reserved_at = describe_moment(document, peak.reserved_stage, peak.reserved_step)
    lines = [
        _format_verdict(document),
        f"  peak: {allocated} allocated in {allocated_at}; {reserved} reserved in {reserved_at}",
    ]
    if verdict.oom_stage is not None:
        where = f" at {short_source(verdict.oom_source)}" if verdict.oom_source else ""
        tried, used = (format_bytes(size or 0) for size in (verdict.tried_to_allocate_bytes, verdict.in_use_bytes))
        stage = describe_moment(document, verdict.oom_stage, verdict.oom_step or 0)
        lines.append(f"  full: in {stage}{where}, requested {tried} with {used} in use")
    lines.append("  largest at the peak:")
    lines += [f"    {_format_tensor(tensor)}" for tensor in merge_equal_tensors(peak.tensors)[:MAX_TENSORS]]
    findings = [finding for finding in document.findings if finding.id != "does-not-fit"]
    if findings:
        lines.append("  findings:")
        lines += [f"    {finding.severity.value}: {finding.title}" for finding in findings]
    return "\n".join(lines)


def _format_verdict(document: Report) -> str:
    need = format_bytes(document.verdict.required_bytes)
    need += " of host memory" if document.on_cpu else f" {describe_added_memory(document.device)}"
    name, size = document.device.name, format_bytes(document.device.total_bytes or 0)
    gpu = name if size in name else f"{name}, {size}"
    growth = document.verdict.growth
    if growth is not None and growth.runs_out:
        problem = f"runs out of memory at about step {growth.runs_out_step:,}"
        return f"does not fit: {problem}; {growth.steps_seen} steps took {need} ({gpu})"
    if document.verdict.fits is False:
        return f"does not fit: it takes {need} ({gpu})"
    if document.failure is not None and document.failure.kind in (FailureKind.REFUSED, FailureKind.OTHER_RANK):
        is_refused = document.failure.kind == FailureKind.REFUSED
        usage = f"what was simulated takes {need}" if is_refused else f"until then it took {need}"
        return f"no verdict: {document.failure.message}; {usage} ({gpu})"
    if document.verdict.fits is None:
        return f"stopped early: it took {need} until then ({gpu})"
    if document.paged_bytes:
        return f"fits, but pages: it takes {need} ({gpu})"
    return f"fits: it takes {need} ({gpu})"


def _format_tensor(tensor: LiveTensor) -> str:
    count = f"{tensor.count} x " if tensor.count > 1 else ""
    owner = tensor.name or tensor.module or ""
    where = f" at {short_source(tensor.source)}" if tensor.source and not tensor.name else ""
    size = format_bytes(tensor.num_bytes)
    return f"{count}{size} [{format_shape(tensor.shape)}] {tensor.dtype}: {tensor.category} {owner}".rstrip() + where
