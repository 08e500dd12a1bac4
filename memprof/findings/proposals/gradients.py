"""Proposes torch.autograd.grad for torch.func.grad, which keeps all that it computes, to be differentiated again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context
from memprof.findings.idle_storages import find_phase
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import NONE, PhaseKind

_FUNCTIONS = ("torch.func.grad", "torch.func.grad_and_value")


@proposes(46)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change of each line that calls torch.func.grad outside vmap: its tensors are freed as they are used.

    (torch.func.grad calls the engine with create_graph=True, which frees no saved tensor.)
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    if not trace.last_uses:
        return
    frees: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for caller in trace.callers:
        index = caller.storage
        used, birth = trace.last_uses[index], lifetimes.births[index]
        if caller.by not in _FUNCTIONS or any(call.begin <= birth < call.end for call in trace.vmaps):
            continue
        # What only the forward has used, a backward that has not ended may wait for.
        is_done = used != NONE and find_phase(context.phases, used).kind is PhaseKind.BACKWARD
        if is_done and used < lifetimes.deaths[index]:
            frees[caller.by, caller.source][index] = used
    for (function, source), own in frees.items():
        line = file_and_line(trace.source_at(source))
        change = f"use torch.autograd.grad instead of {function} at {line}, unless it is differentiated again"
        yield Proposal(free_earlier(trace, own), change, source=trace.source_at(source))
