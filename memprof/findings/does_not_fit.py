"""Rule `does-not-fit`: where a run runs out of GPU memory, and how much memory each category needs."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, format_shape, live_evidence, percent, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.suggestions import list_fix_names, suggest
from memprof.ledger.stages import Span, format_stage
from memprof.units import format_bytes

MIN_SHARE = 0.05  # of the peak: smaller categories are not listed


@rule(30)
def find(context: Context) -> list[Finding]:
    """Return at most one finding, for the first failed allocation; `num_bytes`: reserved peak minus GPU memory."""
    usable_bytes = context.usable_bytes
    ledger = context.ledger
    oom = ledger.out_of_memory
    if usable_bytes is None or oom is None:
        return []
    trace = ledger.trace
    storage = trace.storages[oom.storage]
    needed_bytes = ledger.run.required_reserved_bytes
    shortfall = max(needed_bytes - oom.limit_bytes, 0)
    cached = oom.reserved_bytes - oom.in_use_bytes
    gpu = context.gpu or "the GPU"
    stage = stage_text(oom.stage)
    run_text, at_least = ("the run until then", "at least ") if trace.ended_out_of_memory else ("the whole run", "")
    location = f"in {trace.op(storage)} at {file_and_line(trace.source_line(storage))}"
    evidence = [
        tensor_evidence(
            trace,
            oom.storage,
            f"runs out of memory in {stage}: tried to allocate {format_bytes(oom.tried_bytes)} for "
            f"{format_shape(storage.shape)} {storage.dtype} {location}",
            num_bytes=oom.tried_bytes,
        ),
        Evidence(
            f"{format_bytes(oom.in_use_bytes)} of {format_bytes(oom.limit_bytes)} were in use, {format_bytes(cached)} "
            f"reserved in pieces too small for this allocation, {format_bytes(oom.free_bytes)} free",
            num_bytes=oom.in_use_bytes,
        ),
        Evidence(
            f"{run_text} reserves {format_bytes(needed_bytes)}, in {stage_text(ledger.peak_reserved_stage)}; "
            f"{format_bytes(ledger.peak_bytes)} are allocated, in {stage_text(ledger.peak_stage)}",
            num_bytes=needed_bytes,
        ),
    ]
    for category, num_bytes in ledger.sum_by_category().items():
        if num_bytes >= MIN_SHARE * ledger.peak_bytes:
            share = percent(num_bytes, ledger.peak_bytes)
            evidence.append(Evidence(f"{category}: {format_bytes(num_bytes)} ({share} of the peak)", num_bytes))
    title = (
        f"Does not fit: {gpu} is full in {stage}, trying to allocate {format_bytes(oom.tried_bytes)}; the run needs "
        f"{at_least}{format_bytes(needed_bytes)}, {format_bytes(shortfall)} more than the "
        f"{format_bytes(oom.limit_bytes)} there are"
    )
    found = suggest(context)
    if not found:
        largest = max(ledger.live, key=lambda tensor: tensor.allocated_bytes)
        count = f"{largest.count} tensors" if largest.count > 1 else "the tensor"
        text = (
            f"most of it, {format_bytes(largest.allocated_bytes)}, is {count} {format_shape(largest.shape)} "
            f"{largest.dtype} by {largest.op} at {file_and_line(largest.source)}"
        )
        evidence.append(live_evidence(largest, text, num_bytes=largest.allocated_bytes))
    fixes = list_fix_names(found)
    return [Finding("does-not-fit", Severity.ERROR, title, shortfall, tuple(evidence), fixes, suggestions=found)]


def stage_text(span: Span) -> str:
    """Return the stage and step of `span` as text: "layer 3 of step 1"."""
    return format_stage("the inputs" if span.name == "inputs" else span.name, span.step, span.micro_batch)
