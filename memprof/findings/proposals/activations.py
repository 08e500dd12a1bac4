"""Proposes torch's own activation functions for those that a program computes of others, each of which keeps more."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, is_forward
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, Trace

# What is multiplied by its input, after which operators -> the function of torch that keeps its input alone.
_FUNCTIONS = {("aten.sigmoid",): "silu", ("aten.softplus", "aten.tanh"): "mish"}

_ACTIVATIONS = {"aten.sigmoid", "aten.softplus", "aten.tanh", "aten.relu", "aten.gelu"}


@proposes(38)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change of each function that a line computes as a product with its input."""
    trace, at_peak = context.ledger.trace, context.lifetimes.at_peak
    for ops, name in _FUNCTIONS.items():
        inner = [index for members in _list_products(trace, ops) for index in members]
        kept = at_peak.intersection(inner)
        if not kept:
            continue
        line = file_and_line(trace.source_line(trace.storages[min(kept)]))
        by = " and ".join(op.removeprefix("aten.") for op in ops)
        gate = " (glu for two tensors)" if name == "silu" else ""  # what is multiplied is not recorded
        if gate and _is_scaled(trace, min(kept)):
            gate = "(c * x) / c"
        change = (
            f"use torch.nn.functional.{name}{gate} instead of the product with {by} at {line}: it saves only its input"
        )
        yield Proposal(resize(trace, dict.fromkeys(inner, 0)), change)


def _is_scaled(trace: Trace, first: int) -> bool:
    """Return whether the operator at `first` is applied to a product of its line: `x * sigmoid(c * x)`."""
    own = trace.storages[max(first - 1, 0) : first + 1]
    return trace.op(own[0]) == "aten.mul" and len({(one.source, one.shape, one.module) for one in own}) == 1


def _list_products(trace: Trace, ops: tuple[str, ...]) -> Iterator[range]:
    """Yield the storages of `ops` that one line makes one after another, and a product of their shape after them.

    A line with another of _ACTIVATIONS multiplies two functions: tanh(f(x)) * sigmoid(g(x)).
    """
    names = [*ops, "aten.mul"]
    others = _ACTIVATIONS.difference(ops)
    left_out = {NONE, *(one.source for one in trace.storages if trace.op(one) in others)}
    for first, storage in enumerate(trace.storages):
        if trace.op(storage) != names[0] or storage.source in left_out or not is_forward(trace, storage):
            continue
        own = trace.storages[first : first + len(names)]
        is_alike = len({(one.source, one.shape, one.module) for one in own}) == 1
        if is_alike and [trace.op(one) for one in own] == names:
            yield range(first, first + len(ops))
