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
    """Return the report on GPU `gpu` (None: the GPU with the highest usage), with the verdict on all GPUs.

    `report` returns ledger and report of one GPU. Raises EmptyTraceError: nothing was allocated on any GPU; UsageError:
    GPU `gpu` does not exist, or nothing was allocated on this GPU.
    """
    if gpu is not None and f"cuda:{gpu}" not in trace.gpus:
        raise UsageError("the run had no such GPU", value=f"--gpu-index {gpu}", hint=f"it had {', '.join(trace.gpus)}")
    allocating = {storage.device for storage in trace.storages if storage.num_bytes}
    # The other GPUs of the machine are used by other ranks.
    gpus = [device for device, used in trace.gpus.items() if used or device in allocating or trace.facts.rank is None]
    made = {device: report(trace.select_device(device)) for device in gpus if device in allocating}
    if not made:
        return report(trace)[1]  # raises EmptyTraceError, unless the file's GPUs are not those of its storages
    decides = min(made, key=lambda device: _severity_key(*made[device]))
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
        gpus=tuple(_gpu_row(trace, device, made.get(device, (None, None))[1], decides, shown) for device in gpus),
    )


def _severity_key(ledger: Ledger, document: Report) -> tuple[float, float, int, int]:
    """Return a sort key: GPUs that run out of memory first, then by predicted exhaustion, required and peak bytes."""
    oom, growth = ledger.out_of_memory, document.verdict.growth
    event = float("inf") if oom is None else oom.event
    step = float("inf") if growth is None or growth.runs_out_step is None else growth.runs_out_step
    return event, step, -document.verdict.required_bytes, -document.peak.allocated_bytes


def _gpu_row(trace: Trace, device: str, document: Report | None, decides: str, shown: str) -> GpuRow:
    facts = trace.facts.device
    used = document is not None or trace.gpus[device]
    context = facts.context_bytes if used else 0
    return GpuRow(
        device=device,
        used=used,
        total_bytes=facts.total_bytes,
        context_bytes=context,
        fits=document.verdict.fits if document else True,
        decides=device == decides,
        shown=device == shown,
        **make_peak_fields(document, context),
    )


def make_peak_fields(document: Report | None, context_bytes: int) -> dict[str, Any]:
    """Return the peak fields of the row of a GPU or rank; with `document` None, of a GPU without allocations."""
    return {
        "peak_allocated_bytes": document.peak.allocated_bytes if document else 0,
        "peak_stage": document.peak.stage if document else "",
        "peak_reserved_bytes": document.peak.reserved_bytes if document else 0,
        "device_used_bytes": document.peak.device_used_bytes if document else context_bytes,
        "required_bytes": document.verdict.required_bytes if document else context_bytes,
    }


def merge_findings(shown: str, own: Sequence[Finding], others: Sequence[tuple[str, Report]]) -> tuple[Finding, ...]:
    """Return the findings of the GPU or rank `shown`, and the errors and further kinds of findings of the others.

    The title of a finding names its GPU or rank, unless all have the finding.
    """
    found = [one if all(one in other.findings for _, other in others) else _name_device(shown, one) for one in own]
    known = {one.id for one in own}
    for device, other in others:
        new = (one for one in other.findings if one.severity is Severity.ERROR or one.id not in known)
        found += [_name_device(device, one) for one in new if one not in own]
        known |= {one.id for one in other.findings}
    return tuple(sorted(found, key=lambda one: one.severity is not Severity.ERROR))


def _name_device(device: str, finding: Finding) -> Finding:
    return dataclasses.replace(finding, title=f"{device}: {finding.title}")
