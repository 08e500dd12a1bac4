"""Rule `left-in-eval-mode`: an evaluation leaves a model in eval mode, and the training that follows takes more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memprof.allocator import MemoryNeeds
from memprof.findings.effect import compute_needs_of, effect_evidence, is_decisive
from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import is_large
from memprof.findings.idle_storages import find_phase
from memprof.findings.proposals.checkpointing import checkpoint_layers
from memprof.trace.events import Forward, PhaseKind
from memprof.units import format_bytes


class _Change(NamedTuple):
    """The last call of a model in training mode, and the first in eval mode that trains it."""

    last: Forward
    first: Forward


@rule(72)
def find(context: Context) -> list[Finding]:
    """Return a finding for each model; `num_bytes` is the peak minus that of the steps in training mode."""
    findings = (_make_finding(context, change) for change in _iterate_changes(context))
    return [finding for finding in findings if finding is not None]


def _iterate_changes(context: Context) -> Iterator[_Change]:
    """Yield the change of each model whose calls with gradients are all in training mode up to one, and in eval mode
    after it, from the same line, with an evaluation in between.

    Training goes on after it: there is a backward and a step of an optimizer, or memory has run out before.
    """
    trace = context.ledger.trace
    trained_at = [
        [time for time, phase in context.phases if phase.kind is kind]
        for kind in (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP)
    ]
    for module in {forward.module for forward in trace.forwards}:
        calls = [forward for forward in trace.list_calls() if forward.module == module]
        graded = [forward for forward in calls if forward.nodes]
        first = next((forward for forward in graded if not forward.training), None)
        if first is None or not graded[0].training or any(one.training and one.begin > first.begin for one in graded):
            continue
        before = [forward for forward in graded if forward.training]
        between = (one for one in calls if before[-1].begin < one.begin < first.begin)
        is_evaluated = any(not one.training and not one.nodes for one in between)
        has_trained = all(any(before[0].begin < time < first.begin for time in times) for times in trained_at)
        goes_on = trace.ended_out_of_memory or all(any(time > first.begin for time in times) for times in trained_at)
        if is_evaluated and has_trained and goes_on and first.source in {one.source for one in before}:
            yield _Change(before[-1], first)


def _make_finding(context: Context, change: _Change) -> Finding | None:
    """Return the finding; None if the steps in eval mode do not take much more memory, or for another reason."""
    ledger, trace = context.ledger, context.ledger.trace
    usual_bytes = max(ledger.allocated[: change.first.begin])
    saved_bytes = ledger.peak_bytes - usual_bytes
    if not is_large(context, saved_bytes):
        return None
    calls = [
        call
        for call in trace.eval_calls
        if call.module == change.last.module and change.last.begin < call.event <= change.first.begin
    ]
    source = trace.source_at(calls[-1].source) if calls else None
    name = trace.modules[change.last.module].class_name
    step = find_phase(context.phases, change.first.begin).step
    after = "its evaluation" if source is None else f"eval() at {file_and_line(source)}"
    needs = _compute_needs(context)
    if needs is None:  # without checkpointing the mode takes no more memory, but another batch may
        return None
    decides = is_decisive(context, needs)
    title = (
        f"{name} is trained in eval mode from step {step} on: model.train() is missing after {after}. In training mode "
        f"the run allocates at most {format_bytes(usual_bytes)}, in eval mode {format_bytes(ledger.peak_bytes)}, for "
        "activation checkpointing works in training mode alone"
    )
    evidence = (
        Evidence(f"fix: call model.train() before training goes on, after {after}", source=source),
        effect_evidence(context, needs, "with activation checkpointing"),
    )
    return Finding("left-in-eval-mode", Severity.WARNING, title, saved_bytes, evidence, (), is_decisive=decides)


def _compute_needs(context: Context) -> MemoryNeeds | None:
    """Return what the run needs if its layers run again in each backward; None if the program does not ask for that."""
    changed = checkpoint_layers(context) if context.ledger.trace.checkpoints else None
    return None if changed is None else compute_needs_of(context, changed)
