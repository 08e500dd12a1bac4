"""Proposes to detach what a generator returns, where its critic is trained first and memory runs out in that."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import Forward, PhaseKind, Trace


@proposes(36)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change of the call that is given what another model returns, if memory runs out before any step.

    Each model has an optimizer of its own, and the one that is given it was called before, for other data: its loss of
    both is the critic's. (The generator's loss takes one call.) Once there was a step, gradients that nobody uses tell.
    """
    trace, deaths = context.ledger.trace, context.lifetimes.deaths
    calls = [call for call in trace.list_calls() if not _is_loss(trace, call)]
    stepped = any(phase.kind is PhaseKind.OPTIMIZER_STEP for phase in trace.phases)
    if not (trace.ended_out_of_memory and trace.last_uses and len(trace.first_steps) > 1) or stepped or not calls:
        return
    last = calls[-1]
    if not any(call.module == last.module and call.nodes for call in calls[:-1]):
        return
    for call in calls[:-1]:
        is_given = any(trace.last_uses[index] >= last.begin for index in call.outputs)
        own, others = _find_optimizers(trace, call, call.end), _find_optimizers(trace, last, len(trace.events))
        if not (call.nodes and is_given and own and others - own):  # a backward may have used both
            continue
        kept = [
            index
            for index in range(len(trace.storages))
            if call.begin <= context.lifetimes.births[index] < call.end < deaths[index]
            and index not in trace.owners
            and index not in call.outputs
        ]
        source = trace.source_at(last.source)
        name = trace.modules[call.module].class_name
        change = (
            f"call .detach() on what `{name}` returns, for the call at {file_and_line(source)}: training "
            f"`{trace.modules[last.module].class_name}` needs no graph of it"
        )
        yield Proposal(free_earlier(trace, dict.fromkeys(kept, call.end)), change, source=source)
        return


def _is_loss(trace: Trace, call: Forward) -> bool:
    """Return whether a call returns single numbers, as modules of losses do."""
    return bool(call.outputs) and not any(trace.storages[index].shape for index in call.outputs)


def _find_optimizers(trace: Trace, call: Forward, end: int) -> set[int]:
    """Return the positions in `Trace.first_steps` of the optimizers with parameters that were last used from the begin
    of `call` to the event `end`."""
    return {
        position
        for position, step in enumerate(trace.first_steps)
        if any(call.begin < trace.last_uses[index] <= end for index in step.parameters)
    }
