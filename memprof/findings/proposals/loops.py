"""Proposes checkpoints for a loop of functions outside layers, whose rounds autograd keeps, as those of a solver."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from memprof.findings.evidence import file_and_line, is_inference
from memprof.findings.finding import Context
from memprof.findings.proposals.checkpointing import checkpoint_calls, make_layer_calls
from memprof.findings.suggestions import Proposal, proposes
from memprof.trace.events import NONE, ModuleRole, PhaseKind, Trace

MIN_ROUNDS = 16  # tensors of one line that are kept: fewer may be the parts of a loss

MIN_SHARE = 0.25  # of the peak, that the rounds take


@proposes(59)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the line outside layers that keeps most until the backward, and what runs between."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    if context.spec is not None or is_inference(trace):
        return
    held = {index for holder in trace.holders for index in holder.storages}  # by the program, and not by autograd
    kept = sorted(index for index in lifetimes.at_peak - held if _is_of_function(trace, index))
    lines: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in kept:
        lines[trace.storages[index].source, trace.storages[index].op].append(index)
    many = [members for members in lines.values() if len(members) >= MIN_ROUNDS]
    rounds = max(many, key=lifetimes.sum_bytes, default=[])
    if not rounds:
        return
    begin, end = lifetimes.births[rounds[0]], lifetimes.births[rounds[-1]]
    within = [index for index in kept if begin <= lifetimes.births[index] <= end]
    if lifetimes.sum_bytes(within) < MIN_SHARE * context.ledger.peak_bytes:
        return
    size = math.isqrt(len(rounds))
    begins = [*(lifetimes.births[index] for index in rounds[::size]), end]
    spans = [(NONE, first, last) for first, last in pairwise(begins) if first < last]
    changed = checkpoint_calls(context, make_layer_calls(trace, spans))
    if changed is not None:
        line = file_and_line(trace.source_line(trace.storages[rounds[0]]))
        change = (
            f"run the loop of {len(rounds)} rounds at {line} under torch.utils.checkpoint, {size} rounds at a time; "
            "fewer rounds, or a smaller input for them, need less too"
        )
        yield Proposal(changed, change)


def _is_of_function(trace: Trace, index: int) -> bool:
    """Return whether a forward has made the storage by a line outside modules, or of the model itself."""
    storage = trace.storages[index]
    is_outside = storage.module == NONE or trace.modules[storage.module].role is ModuleRole.ROOT
    is_own = storage.source != NONE and index not in trace.owners and not storage.hidden
    return is_outside and is_own and trace.phases[storage.phase].kind is PhaseKind.FORWARD
