"""Rule `graph-pools`: each CUDA graph has a private pool, and what is free in one serves no other graph."""

from __future__ import annotations

from collections import Counter, defaultdict

from memprof.findings.effect import MIN_CAUSE_SHARE
from memprof.findings.evidence import file_and_line, percent
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import fix_at
from memprof.units import MIB, format_bytes

MIN_BYTES = 256 * MIB
MIN_SHARE = 0.05  # of reserved memory; one pool must save this share and MIN_BYTES, unless the run would fit with it

_FIX = (
    "use one pool for all graphs, if they are replayed one at a time: torch.cuda.graph(graph, pool=handle), with one "
    "handle = torch.cuda.graph_pool_handle(); "
    "capture the largest input first"
)


@rule(83)
def find(context: Context) -> list[Finding]:
    """Return a finding for each line that captures into several pools; `num_bytes` is what is free in these, without
    that in the pool with most of it: one pool for all has to have room for the largest graph."""
    by_line: dict[str, set[int]] = defaultdict(set)
    for one in context.ledger.trace.graph_pools:
        by_line[one.source].add(one.pool)
    findings = (_make_finding(context, source, pools) for source, pools in by_line.items() if len(pools) > 1)
    return [finding for finding in findings if finding is not None]


def _make_finding(context: Context, source: str, pools: set[int]) -> Finding | None:
    run, limit = context.ledger.run, context.usable_bytes
    segments, _ = run.layout_at(context.ledger.peak_reserved_event)
    reserved = sum(segment.size for segment in segments)
    free = Counter[int]()
    for segment in segments:
        if segment.pool_id[0] in pools:
            free[segment.pool_id[0]] += segment.size - segment.allocated
    saved_bytes = free.total() - max(free.values(), default=0)
    needed_bytes = run.required_reserved_bytes - saved_bytes
    is_decisive = not run.fits and limit is not None and needed_bytes <= limit
    is_decisive = is_decisive and saved_bytes >= MIN_CAUSE_SHARE * run.required_reserved_bytes
    if not is_decisive and (saved_bytes < MIN_BYTES or saved_bytes < MIN_SHARE * reserved):
        return None
    title = (
        f"CUDA graphs captured at {file_and_line(source)} have {len(free)} private pools: {format_bytes(saved_bytes)} "
        f"of the {format_bytes(reserved)} reserved ({percent(saved_bytes, reserved)}) are free in these, each for its "
        "own graph alone"
    )
    effect = f"with one pool the run reserves at least {format_bytes(needed_bytes)}"
    evidence = (fix_at(source, _FIX), Evidence(effect, num_bytes=saved_bytes))
    severity = Severity.WARNING if is_decisive else Severity.NOTE
    return Finding("graph-pools", severity, title, saved_bytes, evidence, (), is_decisive=is_decisive)
