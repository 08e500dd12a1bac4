"""Rule `memory-growth`: tensors of every training step stay live, so that memory grows until the GPU is full."""

from __future__ import annotations

from memprof.findings.effect import compute_needs_without, effect_evidence, is_decisive
from memprof.findings.evidence import plural
from memprof.findings.exhaustion import Growth, predict_growth
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.growth import (
    MIN_STEP_BYTES,
    LeakGroup,
    find_holder_keys,
    find_step_leaks,
    format_holders,
    holder_evidence,
    holder_fix_evidence,
    is_of_model,
    leak_evidence,
)
from memprof.ledger.steps import list_training_steps
from memprof.trace.events import CycleKind, Holder
from memprof.units import format_bytes

WARNING_BYTES = 1 << 20  # per step: less is only a note


_CYCLE_FIXES = {
    CycleKind.GRAD: "take the gradient with torch.autograd.grad(..., create_graph=True), or set .grad = None after the "
    "step",
    CycleKind.CTX: "give it to ctx.save_for_backward(...), which keeps no cycle",
    CycleKind.FUNCTION: "let the function not refer to what it is registered on, or remove it (handle.remove())",
    CycleKind.OBJECTS: "set the attribute to None at the end, or make it a weakref.ref; until then the memory is freed "
    "only when Python's garbage collector happens to run (gc.collect())",
}


@rule(50)
def find(context: Context) -> list[Finding]:
    """Return one finding per holder of leaked tensors; `num_bytes` is the growth from the first step's end to the last.

    The severity is an error if memory will run out. A container with a maximum length is reported only in this case.
    """
    steps = list_training_steps(context.ledger.trace, context.ledger.allocated)
    growth = predict_growth(context)
    return [
        _make_finding(context, holder, leaks, len(steps), growth)
        for holder, leaks in _find_leaks(context).items()
        if _is_reported(holder, leaks, growth)
    ]


def _find_leaks(context: Context) -> dict[Holder | None, list[LeakGroup]]:
    """Return holder -> leaks, without those of whole models, which `models-pile-up` reports."""
    trace = context.ledger.trace
    result = {}
    for holder, leaks in find_step_leaks(context).items():
        others = [leak for leak in leaks if not is_of_model(trace, leak)]
        if others or not leaks:  # none: a running sum, whose graph grows on the host
            result[holder] = others
    return result


def _is_reported(holder: Holder | None, leaks: list[LeakGroup], growth: Growth | None) -> bool:
    if holder is not None and holder.limit is not None:
        return growth is not None and growth.runs_out
    return sum(leak.bytes_each for leak in leaks) >= MIN_STEP_BYTES or (holder is not None and holder.nodes > 0)


def _make_finding(
    context: Context, holder: Holder | None, leaks: list[LeakGroup], num_steps: int, growth: Growth | None
) -> Finding:
    per_step = sum(leak.bytes_each for leak in leaks)
    trace = context.ledger.trace
    evidence = [holder_evidence(holder)]
    evidence += leak_evidence(trace, leaks, "step")
    needs = None
    if trace.last_uses and not context.ledger.run.fits:
        needs = compute_needs_without(context, [index for leak in leaks for index in leak.storages])
        evidence.append(effect_evidence(context, needs))
    if holder is not None and holder.nodes:
        evidence.append(_make_graph_evidence(context, holder, leaks))
    if growth is not None and growth.runs_out_step is not None and per_step:
        evidence.append(Evidence(f"memory runs out at about step {growth.runs_out_step:,}"))
    evidence.append(
        _make_fix_evidence(holder, per_step - (_sum_saved_bytes(context, holder, leaks) if holder is not None else 0))
    )
    severity = Severity.WARNING if per_step >= WARNING_BYTES else Severity.NOTE
    if growth is not None and growth.runs_out and per_step >= MIN_STEP_BYTES:
        severity = Severity.ERROR
    num_bytes = sum(leak.num_bytes for leak in leaks) or None
    return Finding(
        "memory-growth",
        severity,
        _format_title(holder, per_step, num_steps) + "; without them the run fits" * is_decisive(context, needs),
        num_bytes,
        tuple(evidence),
        (),
        is_decisive=is_decisive(context, needs),
    )


def _format_title(holder: Holder | None, bytes_per_step: int, num_steps: int) -> str:
    kept_by = format_holders(holder)
    if not bytes_per_step:
        return f"The graph of every step stays alive{kept_by}: it takes host memory, and nothing on the GPU"
    growth_text = f"Memory grows by {format_bytes(bytes_per_step)} a step in {num_steps} steps"
    return f"{growth_text}: tensors of each step stay alive{kept_by}"


def _make_graph_evidence(context: Context, holder: Holder, leaks: list[LeakGroup]) -> Evidence:
    """Return evidence of the autograd graph that `holder` keeps alive, and of the tensors that the graph saves."""
    steps = plural(holder.node_steps, "step")
    nodes = f"an autograd graph hangs on it: {plural(holder.nodes, 'node')} from {steps} when it was looked at"
    saved_bytes = _sum_saved_bytes(context, holder, leaks)
    if saved_bytes:
        text = f"{nodes}; what it saved for a backward is live with it: {format_bytes(saved_bytes)} a step"
    else:
        text = f"{nodes}; backward has freed what it saved, so that it takes host memory alone"
    return Evidence(text, num_bytes=saved_bytes or None, source=holder.source)


def _sum_saved_bytes(context: Context, holder: Holder, leaks: list[LeakGroup]) -> int:
    """Return the bytes per step that the holder's autograd graph keeps: leaks not held by the holder itself."""
    holder_keys = find_holder_keys(context.ledger.trace, holder)
    return sum(leak.bytes_each for leak in leaks if leak.key not in holder_keys) if holder.nodes else 0


def _make_fix_evidence(holder: Holder | None, kept_bytes: int) -> Evidence:
    """Return evidence with the fix. `kept_bytes`: what a step adds even if the autograd graph is dropped (`detach`)."""
    if holder is not None and holder.kind in _CYCLE_FIXES:
        fix = _CYCLE_FIXES[CycleKind(holder.kind)]
    elif kept_bytes >= MIN_STEP_BYTES:
        fix = "keep what is needed of each step in host memory (.detach().cpu()) or as a number (.item()), or drop it"
    else:
        fix = "keep the number (.item()), or the tensor without its graph (.detach())"
    return holder_fix_evidence(holder, fix)
