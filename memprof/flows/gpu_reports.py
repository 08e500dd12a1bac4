"""A run that had several GPUs in one process: a report of each, put together."""

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


def document_of_gpus(trace: Trace, report: Callable[[Trace], tuple[Ledger, Report]], gpu: int | None = None) -> Report:
    """Return the report on GPU `gpu` (None: the one that decides) in full, with the verdict on all of them.

    `report` makes it for one GPU. Raises EmptyTraceError: nothing was allocated on any; UsageError: there is no such
    GPU, or nothing was allocated on it.
    """
    if gpu is not None and f"cuda:{gpu}" not in trace.gpus:
        raise UsageError("the run had no such GPU", value=f"--gpu-index {gpu}", hint=f"it had {', '.join(trace.gpus)}")
    holding = {storage.device for storage in trace.storages if storage.num_bytes}
    # A rank leaves the other GPUs to others.
    gpus = [device for device, used in trace.gpus.items() if used or device in holding or trace.facts.rank is None]
    made = {device: report(trace.on(device)) for device in gpus if device in holding}
    if not made:
        return report(trace)[1]  # which says so, but of a file whose GPUs are not those of its storages
    decides = min(made, key=lambda device: _order(*made[device]))
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
        findings=merged_findings(shown, document.findings, others),
        gpus=tuple(_row(trace, device, made[device][1] if device in made else None, decides, shown) for device in gpus),
    )


def _order(ledger: Ledger, document: Report) -> tuple[float, float, int, int]:
    """Return a key, least for the GPU that is full first, or will be, else that needs most, or holds most."""
    full, growth = ledger.out_of_memory, document.verdict.growth
    event = float("inf") if full is None else full.event
    step = float("inf") if growth is None or growth.runs_out_step is None else growth.runs_out_step
    return event, step, -document.verdict.required_bytes, -document.peak.allocated_bytes


def _row(trace: Trace, device: str, document: Report | None, decides: str, shown: str) -> GpuRow:
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
        **peak_figures(document, context),
    )


def peak_figures(document: Report | None, context_bytes: int) -> dict[str, Any]:
    """Return what the row of a GPU or a rank says of its peak; None: it had nothing beside a context, if that."""
    return {
        "peak_allocated_bytes": document.peak.allocated_bytes if document else 0,
        "peak_stage": document.peak.stage if document else "",
        "peak_reserved_bytes": document.peak.reserved_bytes if document else 0,
        "device_used_bytes": document.peak.device_used_bytes if document else context_bytes,
        "required_bytes": document.verdict.required_bytes if document else context_bytes,
    }


def merged_findings(shown: str, own: Sequence[Finding], others: Sequence[tuple[str, Report]]) -> tuple[Finding, ...]:
    """Return the findings of the GPU or rank that is shown, and of the others errors and what is of another kind.

    What all have alike is of the run, and names none.
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
