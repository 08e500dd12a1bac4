"""Merge of the reports of a run with several GPUs in one process, one report per GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from memprof.errors import UsageError
from memprof.findings import Finding, Severity
from memprof.ledger.ledger import Ledger
from memprof.report.documents.ranks import GpuRow
from memprof.report.documents.report import Report
from memprof.trace.events import Trace


def merge_gpu_reports(trace: Trace, report: Callable[[Trace], tuple[Ledger, Report]], gpu: int | None = None) -> Report:
    """Return the report on the GPU with index `gpu` (None: the highest usage), with the verdict on all GPUs.

    `report` builds ledger and report from the trace of one GPU. Raises EmptyTraceError: nothing was allocated on any
    GPU; UsageError: the GPU does not exist, or nothing was allocated on it.
    """
    if gpu is not None and f"cuda:{gpu}" not in trace.gpus:
        raise UsageError("the run had no such GPU", value=f"--gpu-index {gpu}", hint=f"it had {', '.join(trace.gpus)}")
    used_devices = {storage.device for storage in trace.storages if storage.num_bytes}
    # The other GPUs of the machine are used by other ranks.
    gpus = [device for device, used in trace.gpus.items() if used or device in used_devices or trace.facts.rank is None]
    made = {device: report(trace.select_device(device)) for device in gpus if device in used_devices}
    if not made:
        return report(trace)[1]  # raises EmptyTraceError, unless the file's GPUs are not those of its storages
    decides = min(made, key=lambda device: _make_severity_key(*made[device]))
    if len(gpus) == 1 and gpu is None:
        return made[decides][1]
    shown = decides if gpu is None else f"cuda:{gpu}"
    if shown not in made:
        hint = f"leave out --gpu-index, or ask for {', '.join(made)}"
        raise UsageError("nothing was allocated on this GPU", value=shown, hint=hint)
    document = made[shown][1]
    others = [(device, one) for device, (_, one) in made.items() if device != shown]
    return dataclasses.replace(
        document,
        gpu=shown,
        verdict=made[decides][1].verdict,
        findings=merge_findings(shown, document.findings, others),
        gpus=tuple(_build_gpu_row(trace, device, made.get(device, (None, None))[1], decides, shown) for device in gpus),
    )


def _make_severity_key(ledger: Ledger, document: Report) -> tuple[float, float, int, int]:
    """Return a sort key: GPUs that run out of memory first, then by predicted exhaustion, required and peak bytes."""
    out_of_memory, growth = ledger.out_of_memory, document.verdict.growth
    oom_event = float("inf") if out_of_memory is None else out_of_memory.event
    exhaustion_step = float("inf") if growth is None or growth.runs_out_step is None else growth.runs_out_step
    return oom_event, exhaustion_step, -document.verdict.required_bytes, -document.peak.allocated_bytes


def _build_gpu_row(trace: Trace, device: str, document: Report | None, deciding_gpu: str, shown_gpu: str) -> GpuRow:
    facts = trace.facts.device
    is_used = document is not None or trace.gpus[device]
    context_bytes = facts.context_bytes if is_used else 0
    return GpuRow(
        device=device,
        used=is_used,
        total_bytes=facts.total_bytes,
        context_bytes=context_bytes,
        fits=document.verdict.fits if document else True,
        decides=device == deciding_gpu,
        shown=device == shown_gpu,
        **make_peak_fields(document, context_bytes),
    )


def make_peak_fields(document: Report | None, context_bytes: int) -> dict[str, Any]:
    """Return the fields of a GPU's or rank's table row that describe its peak; `document` None: no allocations."""
    return {
        "peak_allocated_bytes": document.peak.allocated_bytes if document else 0,
        "peak_stage": document.peak.stage if document else "",
        "peak_reserved_bytes": document.peak.reserved_bytes if document else 0,
        "device_used_bytes": document.peak.device_used_bytes if document else context_bytes,
        "required_bytes": document.verdict.required_bytes if document else context_bytes,
    }


def merge_findings(shown: str, own: Sequence[Finding], others: Sequence[tuple[str, Report]]) -> tuple[Finding, ...]:
    """Return the findings `own` of the GPU or rank `shown`, with the findings of other GPUs or ranks added that are
    errors or of new kinds. A title names the GPU or rank, unless all have the finding."""
    merged = [one if all(one in other.findings for _, other in others) else _prefix_title(shown, one) for one in own]
    seen_ids = {one.id for one in own}
    for device, other in others:
        new_findings = (one for one in other.findings if one.severity is Severity.ERROR or one.id not in seen_ids)
        merged += [_prefix_title(device, one) for one in new_findings if one not in own]
        seen_ids |= {one.id for one in other.findings}
    return tuple(sorted(merged, key=lambda one: one.order))


def _prefix_title(device: str, finding: Finding) -> Finding:
    return dataclasses.replace(finding, title=f"{device}: {finding.title}")
