"""An evaluation loop that keeps the outputs of its batches on the card: logits, for the most part."""

from __future__ import annotations

from memprof.findings.calls import loops, made_in
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.growth import (
    Pile,
    by_holder,
    fix_evidence,
    holder_evidence,
    kept_by,
    pile_evidence,
    piles,
    until_full,
)
from memprof.trace.events import NONE, Forward, Holder
from memprof.units import format_bytes

MIN_BYTES = 64 << 10
"""Per call: less is a decoder's tokens, or a metric."""

WARNING_BYTES = 1 << 20
"""Per call: what is less is a note."""

_TRAINER = "transformers/trainer"


@rule(60)
def find(context: Context) -> list[Finding]:
    """One finding for each holder; `num_bytes` is the most that one loop has left on the card after its last call.

    Outputs of the model count, and what the program makes of them outside of every module. What modules keep for
    themselves does not, nor a KV cache.
    """
    trace = context.ledger.trace
    found: dict[tuple[int, Holder | None], tuple[int, Finding]] = {}
    for loop in loops(trace, lambda forward: forward.nodes == 0):
        outputs = {index for forward in loop for index in forward.outputs}
        candidates = [
            index
            for index in made_in(context, loop[0].begin, loop[-1].end)
            if trace.storages[index].module == NONE or index in outputs
        ]
        grown = piles(context, candidates, [forward.end - 1 for forward in loop])
        for holder, group in by_holder(trace, grown).items():
            per_call = sum(pile.per_round for pile in group)
            if per_call < MIN_BYTES or (holder is not None and holder.limit is not None):
                continue
            left = sum(context.lives.sum_bytes(pile.storages) for pile in group)
            if left > found.get((loop[0].module, holder), (0, None))[0]:
                finding = _finding(context, loop, holder, group, per_call, left)
                found[loop[0].module, holder] = (left, finding)
    return [finding for _, finding in found.values()]


def _finding(
    context: Context, loop: list[Forward], holder: Holder | None, group: list[Pile], per_call: int, left: int
) -> Finding:
    trace = context.ledger.trace
    name = trace.modules[loop[0].module].class_name
    title = (
        f"Outputs of {len(loop)} calls of {name} without gradients stay on the card: {format_bytes(per_call)} more a "
        f"call, {format_bytes(left)} after the last{kept_by(holder)}"
    )
    evidence = [holder_evidence(holder)]
    evidence += [pile_evidence(trace, pile, "call") for pile in group]
    if holder is not None and holder.batches is not None:
        whole = holder.batches * per_call
        text = f"the data loader has {holder.batches:,} batches: {format_bytes(whole)} over all of it"
        evidence.append(Evidence(text, num_bytes=whole))
    full = until_full(context, per_call, "call")
    if full is not None:
        evidence.append(full)
    evidence.append(_fix(context, holder, group))
    severity = Severity.WARNING if per_call >= WARNING_BYTES else Severity.NOTE
    return Finding("evaluation-accumulates", severity, title, left, tuple(evidence), ())


def _fix(context: Context, holder: Holder | None, group: list[Pile]) -> Evidence:
    trace = context.ledger.trace
    lines = [None if holder is None else holder.source]
    lines += [trace.source_line(trace.storages[pile.storages[-1]]) for pile in group]
    if any(line is not None and _TRAINER in line.replace("\\", "/") for line in lines):
        return Evidence(
            "fix: give the Trainer preprocess_logits_for_metrics (such as an argmax, so that no logits are kept), or "
            "eval_accumulation_steps=1, which moves them to host memory after each batch"
        )
    return fix_evidence(holder, "keep .cpu() of each batch, or only what the metric needs of it (such as its argmax)")
