"""Rule `does-not-fit`: where a run runs out of GPU memory, and how much memory each category needs."""

from __future__ import annotations

from collections import defaultdict

from memprof.findings.evidence import caller_key, file_and_line, format_shape, percent, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.suggestions import list_fix_names, suggest
from memprof.ledger.stage_amounts import OutOfMemoryMoment, describe_unusable
from memprof.ledger.stages import Span, describe_name, format_stage
from memprof.units import format_bytes

DOES_NOT_FIT = "does-not-fit"

MAX_LIVE_KINDS = 3  # of tensors that are named where memory runs out
MIN_LIVE_SHARE = 0.1  # of the memory of the GPU
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
    needed_bytes = ledger.run.least_reserved_bytes
    reserved_bytes = ledger.run.required_reserved_bytes
    uncached = " if no cached segment is released" * (reserved_bytes > needed_bytes)
    shortfall = max(needed_bytes - oom.limit_bytes, 0)
    cached = oom.reserved_bytes - oom.in_use_bytes
    gpu = context.gpu or "the GPU"
    stage = stage_text(oom.stage)
    run_text, at_least = ("the run until then", "at least ") if trace.ended_out_of_memory else ("the whole run", "")
    location = f"in {trace.op(storage)} at {file_and_line(trace.source_line(storage))}"
    pieces = "" if oom.max_buffer_bytes else f" {describe_unusable(oom.tried_bytes)}"
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
            f"reserved{pieces}, {format_bytes(oom.free_bytes)} free",
            num_bytes=oom.in_use_bytes,
        ),
        Evidence(
            f"{run_text} reserves {format_bytes(reserved_bytes)}{uncached}, in "
            f"{stage_text(ledger.peak_reserved_stage)}; {format_bytes(ledger.peak_bytes)} are allocated, in "
            f"{stage_text(ledger.peak_stage)}",
            num_bytes=reserved_bytes,
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
    if oom.max_buffer_bytes is not None:
        title = (
            f"Does not fit: a tensor of {format_bytes(oom.tried_bytes)} in {stage}, and Metal's buffers on {gpu} are "
            f"below {format_bytes(oom.max_buffer_bytes)}; the run needs {at_least}{format_bytes(needed_bytes)}"
        )
    evidence += _make_live_evidence(context, oom)
    found = suggest(context)
    fixes = list_fix_names(found)
    return [Finding(DOES_NOT_FIT, Severity.ERROR, title, shortfall, tuple(evidence), fixes, suggestions=found)]


def _make_live_evidence(context: Context, oom: OutOfMemoryMoment) -> list[Evidence]:
    """Return evidence of the kinds of tensors with the most bytes where memory runs out: those with at least
    `MIN_LIVE_SHARE` of the memory, or with a tensor larger than the failed allocation."""
    ledger, lifetimes = context.ledger, context.lifetimes
    trace = ledger.trace
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in lifetimes.find_live(oom.event, range(len(trace.storages))).storages:
        s = trace.storages[index]
        if index != oom.storage and s.device == trace.device and not s.hidden:
            key = (ledger.categories[index], s.shape, s.dtype, s.op, s.source, caller_key(trace, index))
            kinds[key].append(index)
    evidence = []
    for (category, *_), members in sorted(kinds.items(), key=lambda kind: -lifetimes.sum_bytes(kind[1])):
        num_bytes, example = lifetimes.sum_bytes(members), members[0]
        s = trace.storages[example]
        if num_bytes < MIN_LIVE_SHARE * oom.limit_bytes and s.num_bytes <= oom.tried_bytes:
            continue
        text = (
            f"in use: {f'{len(members)} x ' if len(members) > 1 else ''}{format_bytes(s.num_bytes)} of {category}, "
            f"{format_shape(s.shape)} {s.dtype} in {trace.op(s)} at {file_and_line(trace.source_line(s))}"
        )
        evidence.append(tensor_evidence(trace, example, text, num_bytes=num_bytes))
    return evidence[:MAX_LIVE_KINDS]


def stage_text(span: Span) -> str:
    """Return the stage and step of `span` as text: "layer 3 of step 1"."""
    name = "the inputs" if span.name == "inputs" else describe_name(span.name)
    return format_stage(name, span.step, span.micro_batch)
