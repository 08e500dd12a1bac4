"""Rule `graph-breaks`: graph breaks of torch.compile, and the tensors that are live across them."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, percent
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.05  # of the peak: below, fusion across the break would change little
MAX_SHOWN = 4


@rule(115)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is None, since the memory of the graph without breaks is not known."""
    ledger = context.ledger
    ends = sorted((end for end in ledger.trace.graph_ends if end.num_bytes), key=lambda end: -end.num_bytes)
    max_bytes = max((end.num_bytes for end in ends), default=0)
    if max_bytes < max(MIN_BYTES, MIN_SHARE * ledger.peak_bytes):
        return []
    lines_text = "a line" if len(ends) == 1 else f"{len(ends)} lines"
    title = (
        f"Compiled graphs end at {lines_text}, and leave up to {format_bytes(max_bytes)} there "
        f"({percent(max_bytes, ledger.peak_bytes)} of the peak)"
    )
    evidence = [
        Evidence(f"{format_bytes(end.num_bytes)} at {file_and_line(end.source)}: {end.why}", source=end.source)
        for end in ends[:MAX_SHOWN]
    ]
    text = "what lies on both sides is not fused; how much less one graph would take is not known"
    return [Finding("graph-breaks", Severity.NOTE, title, None, (*evidence, Evidence(text)), ())]
