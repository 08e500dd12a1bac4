"""Proposes one model at a time on the GPU, where memory runs out in moving one beside others."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import ends_in_building, param_names
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.units import format_bytes

MIN_TIMES = 3  # what all take, of the bytes of the moved model: two may compute in the same step


@proposes(37)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if no model has computed yet, and all together take MIN_TIMES of what the moved one does."""
    trace, births = context.ledger.trace, context.lifetimes.births
    model = trace.moved_model
    if model is None or not ends_in_building(trace):
        return
    parameters = sorted(context.lifetimes.at_peak & param_names(trace).keys(), key=births.__getitem__)
    all_bytes = context.lifetimes.sum_bytes(parameters)
    if all_bytes < MIN_TIMES * model.num_bytes:
        return
    others, other_bytes = [], 0  # as many bytes as the moved model has stay, though a part of it is there
    for index in parameters:
        other_bytes += context.lifetimes.sum_bytes([index])
        if other_bytes <= all_bytes - model.num_bytes:
            others.append(index)
    change = (
        f"have one model at a time on the GPU, if they run one after another: {format_bytes(all_bytes)} of models are "
        f"there when {model.class_name} ({format_bytes(model.num_bytes)}) is moved"
    )
    yield Proposal(resize(trace, dict.fromkeys(others, 0)), change)
