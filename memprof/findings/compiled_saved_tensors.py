"""Rule `compiled-keeps`: torch.compile's code saves more tensors for the backward pass than eager code would."""

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
_CONFIG_MODULE = "torch._functorch.config"


@rule(116)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the difference to eager code, for the calls live at the peak.

    A graph's live calls are counted by its saved results: live storages of the same operator, source line and size.
    """
    ledger = context.ledger
    trace = ledger.trace
    saved: dict[int, list[CompiledSavedTensors]] = {}
    for one in trace.compiled_keeps:
        saved.setdefault(one.graph, []).append(one)
    if not saved:
        return []
    result_keys = {(one.op, one.source, one.num_bytes) for one in trace.compiled_keeps}
    keys = {
        index: (trace.op(storage), trace.source_line(storage) or "", storage.num_bytes)
        for index, storage in enumerate(trace.storages)
        if not storage.hidden
    }
    candidates = [index for index, key in keys.items() if key in result_keys]
    live = Counter(keys[index] for index in context.lifetimes.find_live(ledger.peak_event, candidates).storages)
    calls = {
        graph: max(live[one.op, one.source, one.num_bytes] // one.times for one in tensors)
        for graph, tensors in saved.items()
    }
    excess = sum(tensors[0].more_bytes * calls[graph] for graph, tensors in saved.items())
    if excess < max(MIN_BYTES, MIN_SHARE * ledger.peak_bytes):
        return []
    shown = [(one, one.times * calls[graph]) for graph, tensors in saved.items() for one in tensors if calls[graph]]
    shown.sort(key=lambda pair: -pair[0].num_bytes * pair[1])
    peak_share = percent(excess, ledger.peak_bytes)
    text = f"Compiled code keeps {format_bytes(excess)} more for the backward"
    title = f"{text} than eager code would ({peak_share} of the peak)"
    evidence = [_make_evidence(one, count) for one, count in shown[:MAX_SHOWN]]
    return [Finding("compiled-keeps", Severity.WARNING, title, excess, (*evidence, _make_fix_evidence(shown)), ())]


def _make_evidence(saved: CompiledSavedTensors, count: int) -> Evidence:
    reason = "the partitioner chose to keep it, and not to compute it again"
    if saved.again:
        reason = "the program's backward computes it again, which the compiler takes for the same and keeps"
    text = f"{count} x {format_bytes(saved.num_bytes)} of {saved.op} at {file_and_line(saved.source or None)}: {reason}"
    return Evidence(text, num_bytes=saved.num_bytes, op=saved.op, source=saved.source or None)


def _make_fix_evidence(tensors_with_counts: Sequence[tuple[CompiledSavedTensors, int]]) -> Evidence:
    """Return evidence that names the settings of torch's partitioner that reduce the saved bytes."""
    text = f"fix: set {_CONFIG_MODULE}.activation_memory_budget below 1, which recomputes even products"
    if any(tensor.again for tensor, _ in tensors_with_counts):
        text += f"; with {_CONFIG_MODULE}.cse = False the backward stays as it is written"
    return Evidence(text)
