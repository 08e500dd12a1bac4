"""Tensors of every training step that stay alive: memory that grows until the card is full, be it after hours."""

from __future__ import annotations

from memprof.findings.evidence import plural
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.growth import (
    Pile,
    by_holder,
    fix_evidence,
    holder_evidence,
    is_running_sum,
    kept_by,
    keys_of,
    piles,
    piles_evidence,
    same_holder,
    until_full,
)
from memprof.ledger.steps import training_steps
from memprof.trace.events import MADE_ANEW, Holder, Role, Trace
from memprof.units import format_bytes

MIN_BYTES = 64 << 10
"""Per step, of tensors that carry no graph: less is a metric that is kept as a tensor."""

WARNING_BYTES = 1 << 20
"""Per step: what is less is a note."""

MIN_STEPS = 3
"""Two cannot show that tensors pile up: what waits for its successor looks the same. A sum whose graph goes back over
both steps they can."""


@rule(50)
def find(context: Context) -> list[Finding]:
    """One finding for each holder; `num_bytes` is what has piled up when the last step ends, beyond the first step."""
    steps = training_steps(context.ledger.trace, context.ledger.allocated)
    findings = [_finding(context, holder, group, len(steps)) for holder, group in grown(context).items()]
    return [finding for finding in findings if finding is not None]


def grown(context: Context) -> dict[Holder | None, list[Pile]]:
    """What piles up over the training steps, by who keeps it.

    What has a role (optimizer state, buffers) may grow as it likes; inputs and gradients count once others have come in
    their place, for parameters get their first gradient in any step. A step's own tensors must outlive it. A container
    of limited length is not told of.
    """
    ledger, trace = context.ledger, context.ledger.trace
    steps = training_steps(trace, ledger.allocated)
    if not steps:
        return {}
    births = context.lives.births
    anew = _replaced(trace)
    candidates = [
        index
        for index, storage in enumerate(trace.storages)
        if births[index] >= steps[0].begin
        and storage.device == trace.device
        and not storage.hidden
        and (index not in trace.owners or index in anew)
    ]
    found = piles(context, candidates, [step.end - 1 for step in steps]) if len(steps) >= MIN_STEPS else []
    groups = by_holder(trace, found)
    for holder in trace.holders:
        if is_running_sum(holder) and same_holder(holder) not in {same_holder(one) for one in groups}:
            groups[holder] = []
    return groups


def _replaced(trace: Trace) -> set[int]:
    """Inputs, and gradients that are not the last of their parameter."""
    last = {owner.name: index for index, owner in trace.owners.items() if owner.role is Role.GRADIENT}
    return {index for index, owner in trace.owners.items() if owner.role in MADE_ANEW and last.get(owner.name) != index}


def _finding(context: Context, holder: Holder | None, group: list[Pile], num_steps: int) -> Finding | None:
    per_step = sum(pile.per_round for pile in group)
    has_graph = holder is not None and holder.nodes > 0
    if (holder is not None and holder.limit is not None) or (per_step < MIN_BYTES and not has_graph):
        return None
    trace = context.ledger.trace
    evidence = [holder_evidence(holder)]
    evidence += piles_evidence(trace, group, "step")
    if holder is not None and has_graph:
        evidence.append(_graph(context, holder, group))
    full = until_full(context, per_step, "step")
    if full is not None:
        evidence.append(full)
    evidence.append(_fix(holder, per_step - (_saved(context, holder, group) if holder is not None else 0)))
    severity = Severity.WARNING if per_step >= WARNING_BYTES else Severity.NOTE
    num_bytes = sum(pile.num_bytes for pile in group) or None
    return Finding("memory-growth", severity, _title(holder, per_step, num_steps), num_bytes, tuple(evidence), ())


def _title(holder: Holder | None, per_step: int, num_steps: int) -> str:
    by = kept_by(holder)
    if not per_step:
        return f"The graph of every step stays alive{by}: it takes host memory, and nothing on the card"
    what = f"Memory grows by {format_bytes(per_step)} a step in {num_steps} steps"
    return f"{what}: tensors of each step stay alive{by}"


def _graph(context: Context, holder: Holder, group: list[Pile]) -> Evidence:
    """What the graph that hangs on the kept tensors keeps in turn."""
    steps = plural(holder.node_steps, "step")
    nodes = f"an autograd graph hangs on it: {plural(holder.nodes, 'node')} from {steps} when it was looked at"
    saved = _saved(context, holder, group)
    if saved:
        text = f"{nodes}; what it saved for a backward is alive with it: {format_bytes(saved)} a step"
    else:
        text = f"{nodes}; backward has freed what it saved, so that it takes host memory alone"
    return Evidence(text, num_bytes=saved or None, source=holder.source)


def _saved(context: Context, holder: Holder, group: list[Pile]) -> int:
    """Bytes per step that the graph keeps: what piles up and is not in the holder itself."""
    own = keys_of(context.ledger.trace, holder)
    return sum(pile.per_round for pile in group if pile.key not in own) if holder.nodes else 0


def _fix(holder: Holder | None, kept: int) -> Evidence:
    """`kept` are the bytes per step of the tensors themselves, not of their graph."""
    if kept >= MIN_BYTES:
        what = "keep what is needed of each step in host memory (.detach().cpu()) or as a number (.item()), or drop it"
    else:
        what = "keep the number (.item()), or the tensor without its graph (.detach())"
    return fix_evidence(holder, what)
