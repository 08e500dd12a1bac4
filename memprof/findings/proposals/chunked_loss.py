"""Proposes the loss in chunks: logits of a vocabulary exist for some tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from memprof.allocator.cublas import PRODUCTS
from memprof.findings.evidence import (
    HALF_DTYPES,
    file_and_line,
    find_own_line,
    is_inference,
    vocab_size_of,
    vocabulary_tables,
)
from memprof.findings.finding import Context
from memprof.findings.logits import find_first_logits, find_step_logits
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, Trace
from memprof.units import GIB

_CHUNK_BYTES = GIB  # of a chunk's logits in float32, as the fix has it (fixes/chunked_loss.py)
_FLOAT32_BYTES = 4
# Of targets that are set by scatter, also in place, to smooth them or not.
_TARGETS = ("aten.scatter", "aten.zeros_like", "aten.full_like", "aten.ones_like")
_PRODUCTS = tuple(f"aten.{name}" for name in PRODUCTS)


@proposes(30, fix="chunked-loss", cures=("logits-explosion",))
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model that reads tokens, and has logits of its vocabulary."""
    trace, copies = context.ledger.trace, _find_copies(context)
    if not copies or is_inference(trace):
        return
    changed = _resize_to_chunk(context, copies)
    if context.spec is None and _is_loss_outside_model(context, copies):
        gathered, target = _find_gather(trace, copies), _find_dense_target(trace, copies)
        losses = (index for index in copies if trace.op(trace.storages[index]) == "aten._log_softmax")
        known = (target, gathered, next(losses, None))
        of = next((index for index in known if index is not None), find_first_logits(trace, copies))
        line = find_own_line(trace, of)
        change = "compute the loss in chunks of tokens, in the program's own code, "
        if target is not None:
            change = "use F.cross_entropy(..., label_smoothing=...) instead of targets as large as the logits at "
            change += f"{file_and_line(line)}, and in chunks of tokens"
        elif gathered is not None:
            change = (
                f"use gathered logits minus logsumexp instead of log_softmax at {file_and_line(line)}, in chunks of "
            )
            change += "tokens"
        else:
            change += f"with its log_softmax at {file_and_line(line)}"
        yield Proposal(changed, change, source=line)
    else:
        yield Proposal(changed)


@proposes(31, findings=("logits-explosion",))
def propose_scores(context: Context) -> Iterator[Proposal]:
    """Yield the change for a program that takes the log-probabilities of given tokens, and trains nothing: a score, a
    reference of another model."""
    trace, copies = context.ledger.trace, _find_copies(context)
    if context.spec is not None or not is_inference(trace) or not _is_loss_outside_model(context, copies):
        return
    loss = next(index for index in copies if trace.op(trace.storages[index]) == "aten._log_softmax")
    line = find_own_line(trace, loss)
    change = (
        f"use the tokens' logits minus logsumexp instead of log_softmax at {file_and_line(line)}, in chunks of tokens"
    )
    yield Proposal(_resize_to_chunk(context, copies), change, source=line)


def _find_copies(context: Context) -> list[int]:
    """Return the logits of a model that reads tokens, and what is computed of them; none if they are in host memory."""
    has_words = context.vocab_size is not None or bool(vocabulary_tables(context.ledger.trace))
    if vocab_size_of(context) is None or not has_words:
        return []
    copies = find_step_logits(context)
    return copies if context.lifetimes.find_max_live(copies).num_bytes else []


def _resize_to_chunk(context: Context, copies: list[int]) -> Trace:
    """Return the trace with one chunk of the logits `copies` at a time: however many there were, a chunk has one in
    float32, and one in the head's precision if that is half."""
    trace = context.ledger.trace
    is_half = any(trace.storages[index].dtype in HALF_DTYPES for index in copies)
    num_elements = max(math.prod(trace.storages[index].shape) for index in copies)
    chunk_bytes = min(_CHUNK_BYTES, num_elements * _FLOAT32_BYTES) * (3 if is_half else 2) // 2
    share = min(1.0, chunk_bytes / context.lifetimes.find_max_live(copies).num_bytes)
    return resize(trace, {index: int(trace.storages[index].num_bytes * share) for index in copies})


def _is_loss_outside_model(context: Context, copies: list[int]) -> bool:
    """Return whether every loss of the logits `copies` is computed by the program, or by a module called after that
    whose product the logits are: a model does not see such a loss, and cannot chunk it."""
    trace, births = context.ledger.trace, context.lifetimes.births
    losses = [index for index in copies if trace.op(trace.storages[index]) == "aten._log_softmax"]
    products = [births[index] for index in copies if trace.op(trace.storages[index]) in _PRODUCTS]
    with_loss = [index for index in losses if trace.storages[index].module != NONE]
    calls = [call for call in trace.list_calls() if any(call.begin <= births[i] < call.end for i in with_loss)]
    makes_logits = any(call.begin <= time < call.end for call in calls for time in products)
    return bool(losses) and (not with_loss or (bool(calls) and not makes_logits))


def _find_dense_target(trace: Trace, copies: list[int]) -> int | None:
    """Return the storage of targets with a value for each word, where the loss is a product with log-probabilities."""
    ops = {trace.op(trace.storages[index]) for index in copies}
    if not {"aten._log_softmax", "aten.mul"} <= ops:
        return None
    return next((index for index in copies if trace.op(trace.storages[index]) in _TARGETS), None)


def _find_gather(trace: Trace, copies: list[int]) -> int | None:
    """Return the storage of the log-probabilities of one word of each token; None if the program gathers none."""
    num_tokens = {math.prod(trace.storages[index].shape[:-1]) for index in copies}
    gathers = (index for index, one in enumerate(trace.storages) if trace.op(one) == "aten.gather")
    return next((index for index in gathers if math.prod(trace.storages[index].shape) in num_tokens), None)
