"""Rule `parameters-upcast`: a line replaces parameters in half precision by copies in float32, of twice the bytes."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from memprof.findings.effect import compute_needs_of, is_decisive
from memprof.findings.evidence import HALF_DTYPES, file_and_line, mask_compute_phases, param_names, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.ledger.what_if import resize
from memprof.trace.events import EventKind, Trace
from memprof.units import format_bytes

MIN_SHARE = 0.25  # of the peak: where the copies of a line take less, they are not what fills the GPU


@rule(121)
def find(context: Context) -> list[Finding]:
    """Return one finding per line, if memory runs out; `num_bytes` is what the copies take beyond half precision."""
    ledger, trace = context.ledger, context.ledger.trace
    if ledger.out_of_memory is None:
        return []
    by_line: dict[int, list[int]] = defaultdict(list)
    replaced = _find_replaced(trace)
    for copy in replaced:
        by_line[trace.storages[copy].source].append(copy)
    findings = []
    for source, copies in by_line.items():
        max_live = context.lifetimes.find_max_live(copies)
        if max_live.num_bytes < MIN_SHARE * ledger.peak_bytes:
            continue
        when = " when memory ran out" if trace.ended_out_of_memory else ""
        dtype = trace.storages[replaced[copies[0]]].dtype
        title = (
            f"Parameters in {dtype} are copied to float32 at {file_and_line(trace.source_at(source))}: "
            f"{format_bytes(max_live.num_bytes)} instead of {format_bytes(max_live.num_bytes // 2)}{when}"
        )
        lines = tensors_evidence(context, copies, max_live.event, lambda index: "float32 copy")
        callers = next((found for copy in copies if (found := trace.list_callers(copy))), [])
        own_line = trace.source_at(callers[-1].source if callers else source)
        fix = Evidence(f"fix: leave the parameters in {dtype}, without this cast", source=own_line)
        evidence = (*lines, fix) if own_line is not None else lines
        excess = max_live.num_bytes // 2
        sizes = {copy: trace.storages[copy].num_bytes // 2 for copy in copies}
        needs = compute_needs_of(context, resize(trace, sizes))
        decides = is_decisive(context, needs)
        findings.append(
            Finding("parameters-upcast", Severity.WARNING, title, excess, evidence, (), is_decisive=decides)
        )
    return findings


def _find_replaced(trace: Trace) -> dict[int, int]:
    """Return copy -> original, of the float32 copies that have taken the place of a half-precision tensor at once.

    The inputs of an operator are not recorded: the original has the shape of its copy, and is freed right after it.
    """
    parameters, computes = param_names(trace), mask_compute_phases(trace)
    events = [event for event in trace.events if event.kind in (EventKind.ALLOC, EventKind.FREE)]
    replaced = {}
    for (kind, copy), (next_kind, original) in pairwise(events):
        if kind is EventKind.ALLOC and next_kind is EventKind.FREE and copy in parameters:
            new, old = trace.storages[copy], trace.storages[original]
            is_cast = trace.op(new) == "aten._to_copy" and new.dtype == "float32" and not computes[new.phase]
            if is_cast and old.dtype in HALF_DTYPES and (old.shape, old.device) == (new.shape, trace.device):
                replaced[copy] = original
    return replaced
