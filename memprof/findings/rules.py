"""All rules, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable

from memprof.findings import (
    attention_scores,
    device_mismatch,
    does_not_fit,
    evaluation_accumulates,
    evaluation_with_gradients,
    fragmentation,
    logits,
    memory_growth,
    optimizer_state,
    out_of_memory_caught,
    positions,
    run_failed,
    unattributed,
    upcast,
    vocabulary,
    weight_delta,
)
from memprof.findings.finding import Context, Finding, Severity

RULES: tuple[Callable[[Context], list[Finding]], ...] = (
    run_failed.find,
    device_mismatch.find,
    does_not_fit.find,
    out_of_memory_caught.find,
    memory_growth.find,
    evaluation_accumulates.find,
    evaluation_with_gradients.find,
    fragmentation.find,
    weight_delta.find,
    logits.find,
    attention_scores.find,
    upcast.find,
    optimizer_state.find,
    vocabulary.find,
    positions.find,
    unattributed.find,
)


def find_all(context: Context) -> list[Finding]:
    """What all rules find: errors first, then the most expensive first; those without bytes come last of their kind."""
    findings = [finding for rule in RULES for finding in rule(context)]
    # The sort is stable, so that equal ones stay in the order of the rules.
    return sorted(findings, key=lambda finding: (finding.severity is not Severity.ERROR, -(finding.num_bytes or 0)))
