"""Rule `lbfgs-history`: most of the memory is the history of torch.optim.LBFGS, of two vectors for each iteration."""

from __future__ import annotations

from memprof.findings.effect import (
    compute_needs_with_frees,
    effect_evidence,
    is_decisive,
)
from memprof.findings.evidence import file_and_line, percent, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.proposals.history import HISTORY_SIZE, shorten_history
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.25  # of the peak, that the vectors take: what takes less is none of the causes


@rule(131)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is what the vectors take at most."""
    shorter = shorten_history(context)
    if shorter is None:
        return []
    trace, ledger = context.ledger.trace, context.ledger
    live = context.lifetimes.find_max_live(shorter.vectors)
    if live.num_bytes < MIN_BYTES or live.num_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    needs = compute_needs_with_frees(context, shorter.frees)
    decides = is_decisive(context, needs)
    names = {trace.owners[index].name for index in live.storages}
    title = (
        f"torch.optim.LBFGS, which steps at {file_and_line(shorter.source)}, keeps {len(live.storages)} vectors as "
        f"large as all parameters ({len(names)} for each iteration, up to its history_size, 100 by default): "
        f"{format_bytes(live.num_bytes)} ({percent(live.num_bytes, ledger.peak_bytes)} of the peak)"
    )
    fix = f"fix: set history_size={HISTORY_SIZE} (or less) in torch.optim.LBFGS, or use an optimizer with less state"
    evidence = (
        Evidence(fix, source=shorter.source),
        effect_evidence(context, needs, f"with history_size={HISTORY_SIZE}"),
        *tensors_evidence(context, shorter.vectors, live.event, lambda index: trace.owners[index].name),
    )
    return [Finding("lbfgs-history", Severity.WARNING, title, live.num_bytes, evidence, (), is_decisive=decides)]
