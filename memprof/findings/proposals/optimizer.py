"""Proposes other optimizers: fused (no temporaries), with state in 8 bits, or with state in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.finding import Context
from memprof.findings.optimizer_state import find_state, find_temporaries
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import Role, Trace

_BLOCK, _SCALE_BYTES = 256, 4  # elements that share a scale in bitsandbytes' 8-bit optimizers, and its size
_MIN_ELEMENTS = 4096  # bitsandbytes keeps smaller states in float32 (min_8bit_size)
_ADAM_STATE = {"exp_avg", "exp_avg_sq"}
_FUSED_STATES = (_ADAM_STATE, {"momentum_buffer"})  # of the optimizers that have a fused implementation


@proposes(40, fix="fused-optimizer", findings=("optimizer-step-temporaries",))
def propose_fused(context: Context) -> Iterator[Proposal]:
    """Yield the change for temporaries that an optimizer of torch makes in its step."""
    trace = context.ledger.trace
    temporaries, names = find_temporaries(context), _list_state_names(trace)
    if temporaries and any(own <= names for own in _FUSED_STATES):
        yield Proposal(resize(trace, dict.fromkeys(temporaries, 0)))


@proposes(80, fix="8-bit-optimizer", findings=("float32-optimizer-state", "optimizer-step-temporaries"))
def propose_8_bit(context: Context) -> Iterator[Proposal]:
    """Yield the change for the state of Adam or AdamW."""
    trace = context.ledger.trace
    state = find_state(context)
    if not _list_state_names(trace) >= _ADAM_STATE:
        return
    sizes = dict.fromkeys(find_temporaries(context), 0)
    for index, num_elements in state.items():
        if num_elements >= _MIN_ELEMENTS:
            sizes[index] = num_elements + -(-num_elements // _BLOCK) * _SCALE_BYTES
    yield Proposal(resize(trace, sizes))


@proposes(90, fix="cpu-offload-optimizer")
def propose_on_host(context: Context) -> Iterator[Proposal]:
    """Yield the change for any state of an optimizer, whose step then is on the CPU."""
    trace = context.ledger.trace
    state = find_state(context)
    if state:
        yield Proposal(resize(trace, dict.fromkeys([*state, *find_temporaries(context)], 0)))


def _list_state_names(trace: Trace) -> set[str]:
    return {owner.name for owner in trace.owners.values() if owner.role is Role.OPTIMIZER_STATE}
