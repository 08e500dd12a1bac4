"""Rule `out-of-memory-caught`: the program caught out-of-memory errors, so the run's peak is not its full need."""

from __future__ import annotations

from memprof.findings.does_not_fit import stage_text
from memprof.findings.evidence import file_and_line, format_shape, plural, tensor_evidence
from memprof.findings.finding import Context, Finding, Severity, rule
from memprof.ledger.caught_errors import list_caught_errors
from memprof.units import format_bytes


@rule(40)
def find(context: Context) -> list[Finding]:
    """Return one finding for all failed allocations whose error the program caught; `num_bytes`: the largest one."""
    caught = list_caught_errors(context.ledger)
    if not caught:
        return []
    trace = context.ledger.trace
    evidence = []
    for error in caught:
        stage = stage_text(context.ledger.span_at(error.event))
        allocation = f"{format_bytes(error.num_bytes)} for {format_shape(error.shape)} {error.dtype} in {error.op}"
        usage = f"with {format_bytes(error.in_use_bytes)} in use"
        text = f"{stage}: {allocation} at {file_and_line(error.source)}, {usage}"
        evidence.append(tensor_evidence(trace, trace.events[error.event].ref, text, num_bytes=error.num_bytes))
    largest = max(error.num_bytes for error in caught)
    errors = plural(len(caught), "out-of-memory error")
    title = f"{errors} raised and caught: with --beyond none is raised, and the report shows what the script needs then"
    return [Finding("out-of-memory-caught", Severity.WARNING, title, largest, tuple(evidence), ())]
