"""Rule `unused-kv-cache`: calls of a model keep keys and values for calls that never come."""

from __future__ import annotations

from memprof.findings.effect import (
    compute_needs_with_frees,
    effect_evidence,
    is_decisive,
)
from memprof.findings.evaluation_accumulates import find_kept_storages
from memprof.findings.evidence import file_and_line, percent, plural, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.lifetimes import Saving
from memprof.findings.proposals.kv_cache import find_unused_caches
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.05  # of the peak: found if the peak would be lower by at least this and MIN_BYTES


@rule(62)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak if no call keeps keys and values."""
    caches, trace, ledger = find_unused_caches(context), context.ledger.trace, context.ledger
    if caches is None or not caches.is_certain:
        return []
    lifetimes = context.lifetimes
    kept = find_kept_storages(context).intersection(caches.frees)
    if 2 * lifetimes.sum_bytes(kept) > lifetimes.sum_bytes(caches.frees):
        return []  # evaluation-accumulates tells of the list or dict that keeps them
    saved = [Saving(used, lifetimes.deaths[i], lifetimes.sum_bytes([i])) for i, used in caches.frees.items()]
    num_bytes = lifetimes.peak_reduction(saved)
    if num_bytes < MIN_BYTES or num_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    needs = compute_needs_with_frees(context, caches.frees)
    decides = is_decisive(context, needs)
    live = lifetimes.find_max_live(caches.frees)
    source = trace.source_at(caches.call.source)
    line, name = file_and_line(source), trace.modules[caches.call.module].class_name
    title = (
        f"KV cache: {plural(caches.num_calls, 'call')} of {name} at {line} keep keys and values that no later call "
        f"uses: {format_bytes(live.num_bytes)} ({percent(live.num_bytes, ledger.peak_bytes)} of the peak)"
    )
    evidence = (
        Evidence(f"fix at {line}: use_cache=False in this call, or model.config.use_cache = False", source=source),
        effect_evidence(context, needs, "with use_cache=False"),
        *tensors_evidence(context, caches.frees, live.event, lambda index: "KV cache")[:3],
    )
    return [Finding("unused-kv-cache", Severity.WARNING, title, num_bytes, evidence, (), is_decisive=decides)]
