"""Rule `beyond-positions`: the context is longer than the positions that the model supports."""

from __future__ import annotations

import re

from memprof.findings.evidence import format_shape, param_names, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule

_POSITIONS = re.compile(r"(^|[._])(wpe|pos)", re.IGNORECASE)


@rule(150)
def find(context: Context) -> list[Finding]:
    """Return a finding if the context is too long: an error if learned positions end before it, else a warning."""
    length, max_positions = context.context_length, context.max_positions
    if length is None or max_positions is None or length <= max_positions:
        return []
    trace = context.ledger.trace
    tables = [
        (index, name)
        for index, name in param_names(trace).items()
        if _POSITIONS.search(name)
        and len(trace.storages[index].shape) == 2
        and max_positions <= trace.storages[index].shape[0] < length
    ]
    title = f"Context of {length:,} tokens, but the model was made for at most {max_positions:,} positions"
    if tables:
        index, name = tables[0]
        text = (
            f"{name} {format_shape(trace.storages[index].shape)} has no row beyond: an index out of range on a real run"
        )
        evidence = (tensor_evidence(trace, index, text),)
        return [Finding("beyond-positions", Severity.ERROR, title, None, evidence, ())]
    text = (
        "rotary and relative positions run at any length and take the memory shown here, but the model was not trained "
        "beyond its own: what it says there is not to be trusted without scaling (such as YaRN) or further training"
    )
    return [Finding("beyond-positions", Severity.WARNING, title, None, (Evidence(text),), ())]
