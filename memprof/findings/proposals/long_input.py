"""Proposes parts of one long input of an inference: a recording, a text or an image, cut up."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import format_shape, is_inference, is_input, is_peak_in_evaluation
from memprof.findings.finding import Context
from memprof.findings.proposals.batches import find_fitting_rows, resize_rows
from memprof.findings.suggestions import Proposal, proposes
from memprof.trace.events import PhaseKind, Trace

MIN_LENGTH = 1024  # of a dimension, so that a size of the model is not taken for a part of it

MIN_PART = 64  # elements along the dimension, in a part

MAX_STRIDE = 16  # a layer's results have at least this fraction of the input's length, and at most as many times it

_TOLERANCE = 0.001  # of the length: the edges of convolutions

_PHASES = (PhaseKind.FORWARD, PhaseKind.DECODE, PhaseKind.EVALUATION)


@proposes(65)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if half of the peak is of tensors as long as the largest input, a fraction or a multiple of it.

    With a batch, fewer samples at a time are the better change. In training, parts would be other samples.
    """
    trace, at_peak = context.ledger.trace, context.lifetimes.at_peak
    inputs = [trace.storages[index] for index in at_peak if is_input(trace, index)]
    if context.spec is not None or not inputs or not (is_inference(trace) or is_peak_in_evaluation(context)):
        return
    shape = max(inputs, key=lambda storage: storage.num_bytes).shape
    length = max(shape, default=0)
    if length < MIN_LENGTH or shape[0] != 1:
        return
    long = [index for index in range(len(trace.storages)) if _is_along(trace, index, length)]
    if 2 * context.lifetimes.sum_bytes(at_peak.intersection(long)) < context.ledger.peak_bytes:
        return
    part = find_fitting_rows(context, long, length)
    if part < MIN_PART:  # no part helps enough
        return
    change = (
        f"process the input {format_shape(shape)} of length {length:,} in parts of at most {part:,}, one after another"
    )
    yield Proposal(resize_rows(trace, long, part, length), change)


def _is_along(trace: Trace, index: int, length: int) -> bool:
    """Return whether the storage is made in a forward pass, with a dimension of `length`, a fraction or a multiple of
    it."""
    storage = trace.storages[index]
    if storage.hidden or index in trace.owners or trace.phases[storage.phase].kind not in _PHASES:
        return False
    return any(
        (times := max(length, size) / min(length, size)) < MAX_STRIDE + 0.5 and size >= MIN_LENGTH
        and abs(times - round(times)) <= _TOLERANCE * round(times)
        for size in storage.shape
    )  # fmt: skip
