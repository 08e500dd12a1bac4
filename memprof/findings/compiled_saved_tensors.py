"""Compiled code that saves more for its backward than eager code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memprof.findings.evidence import file_and_line, percent
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.trace.events import CompiledSavedTensors
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.05  # of the peak
MAX_SHOWN = 4
_SETTINGS = "torch._functorch.config"


@rule(116)
def find(context: Context) -> list[Finding]:
    """Find graphs that save more than eager code; `num_bytes` is the difference for the calls live at the peak.

    Calls of a graph are counted by the results that the graph saves: buffers of one line, operator and size.
    """
    ledger = context.ledger
    trace = ledger.trace
    kept: dict[int, list[CompiledSavedTensors]] = {}
    for one in trace.compiled_keeps:
        kept.setdefault(one.graph, []).append(one)
    if not kept:
        return []
    results = {(one.op, one.source, one.num_bytes) for one in trace.compiled_keeps}
    keys = {
        index: (trace.op(storage), trace.source_line(storage) or "", storage.num_bytes)
        for index, storage in enumerate(trace.storages)
        if not storage.hidden
    }
    made = [index for index, key in keys.items() if key in results]
    alive = Counter(keys[index] for index in context.lives.find_live(ledger.peak_event, made).storages)
    calls = {
        graph: max((alive[one.op, one.source, one.num_bytes] // one.times for one in found), default=0)
        for graph, found in kept.items()
    }
    more = sum(found[0].more_bytes * calls[graph] for graph, found in kept.items())
    if more < max(MIN_BYTES, MIN_SHARE * ledger.peak_bytes):
        return []
    shown = [(one, one.times * calls[graph]) for graph, found in kept.items() for one in found if calls[graph]]
    shown.sort(key=lambda pair: -pair[0].num_bytes * pair[1])
    share = percent(more, ledger.peak_bytes)
    what = f"Compiled code keeps {format_bytes(more)} more for the backward"
    title = f"{what} than eager code would ({share} of the peak)"
    evidence = [_make_evidence(one, count) for one, count in shown[:MAX_SHOWN]]
    return [Finding("compiled-keeps", Severity.WARNING, title, more, (*evidence, _make_fix_evidence(shown)), ())]


def _make_evidence(one: CompiledSavedTensors, count: int) -> Evidence:
    why = "the partitioner chose to keep it, and not to compute it again"
    if one.again:
        why = "the program's backward computes it again, which the compiler takes for the same and keeps"
    text = f"{count} x {format_bytes(one.num_bytes)} of {one.op} at {file_and_line(one.source or None)}: {why}"
    return Evidence(text, num_bytes=one.num_bytes, op=one.op, source=one.source or None)


def _make_fix_evidence(shown: Sequence[tuple[CompiledSavedTensors, int]]) -> Evidence:
    """Return the settings of the partitioner that reduced the saved bytes in tests."""
    text = f"fix: {_SETTINGS}.activation_memory_budget below 1 has even products computed again"
    if any(one.again for one, _ in shown):
        text += f"; with {_SETTINGS}.cse = False the backward stays as it is written"
    return Evidence(text)
