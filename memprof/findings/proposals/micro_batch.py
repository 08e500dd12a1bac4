"""Proposes smaller batches with gradient accumulation, where the memory is of tensors with a row for each sample."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from memprof.findings.evaluation_accumulates import TRAINER, find_kept_keys
from memprof.findings.evidence import (
    file_and_line,
    find_call_at,
    find_call_between_steps,
    is_inference,
    is_peak_in_evaluation,
    param_names,
    plural,
)
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.growth import make_key
from memprof.findings.proposals.batches import find_fitting_rows, resize_rows
from memprof.findings.proposals.messages import MIN_NODES
from memprof.findings.proposals.pairs import find_chunks
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import edit_events
from memprof.trace.events import NONE, BatchLoader, Event, EventKind, PhaseKind, Role, Trace, is_own_source

# Where tensors with a row for each sample are made. The samples themselves may be on the GPU all at once.
_EVALUATING = (PhaseKind.DECODE, PhaseKind.EVALUATION)
_PHASES = (PhaseKind.FORWARD, PhaseKind.BACKWARD, *_EVALUATING)


@proposes(66, findings=("logits-explosion", "attention-scores"))
def propose_batches(context: Context) -> Iterator[Proposal]:
    """Yield the change to as many rows at a time as fit, of an inference or an evaluation, which it costs nothing."""
    batches = _find_batches(context)
    if batches is not None and _is_without_gradients(context):
        size, rows, changed = batches
        line, place = _find_loader_line(context, size)
        has_beams = not place and any(shape[0] > size for shape in _list_input_shapes(context))
        beams = ", or fewer beams" * has_beams
        if not place and (line := _find_call_line(context)) is not None:
            place = f" at {file_and_line(line)}"
        change = (
            f"use batches of {rows:,} sample{'s' * (rows > 1)}, one after another, instead of {size:,}{place}{beams}"
        )
        yield Proposal(changed, f"{change}{', under torch.no_grad()' * _saves_in_vain(context)}", source=line)


@proposes(60, fix="micro-batch", findings=("logits-explosion", "attention-scores"))
def propose_accumulation(context: Context) -> Iterator[Proposal]:
    """Yield the change of a training script to as many rows at a time as fit, with their gradients accumulated."""
    batches = _find_batches(context)
    if batches is not None and context.spec is None and not _is_without_gradients(context):
        yield _accumulate(context, *batches)


@proposes(100, fix="micro-batch", findings=("logits-explosion", "attention-scores"))
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the fix with as many rows at a time as fit, for a model by its name."""
    batches = _find_batches(context)
    if batches is not None and context.spec is not None:
        _, rows, changed = batches
        is_equal = not _normalizes_batches(context.ledger.trace)
        yield Proposal(changed, value=rows) if is_equal else _accumulate(context, *batches)


def _accumulate(context: Context, batch_size: int, rows: int, changed: Trace) -> Proposal:
    """Return the proposal of batches of `rows`, whose gradients are accumulated; `changed` is the trace with them."""
    line, place = _find_loader_line(context, batch_size)
    accumulated = f"accumulate gradients over {batch_size // rows} of them"
    change = f"use batches of {rows} instead of {batch_size}{place}, and {accumulated}"
    if _normalizes_batches(context.ledger.trace):  # the fix would leave the gradients as they are
        return Proposal(changed, f"{change} (batch normalization then sees {plural(rows, 'sample')})", source=line)
    return Proposal(changed, change, value=rows, source=line)


def _find_loader_line(context: Context, batch_size: int) -> tuple[str | None, str]:
    """Return the own line that makes the data loader with this batch size that yielded last before the peak, and it as
    text, or the name of the setting, which the Trainer of transformers has; else (None, ""). A run of a model by name
    has the loaders of memprof's own workload."""
    trace = context.ledger.trace
    if context.spec is not None:
        return None, ""
    lines = [trace.sources[loader.source] for loader in _list_loaders(context) if loader.batch_size == batch_size]
    if not lines:
        return None, ""
    if is_own_source(lines[-1]):
        return lines[-1], f" ({file_and_line(lines[-1])})"
    is_of_trainer = TRAINER in lines[-1].replace("\\", "/")
    return None, f" (per_device_{'train' if trace.trains else 'eval'}_batch_size)" if is_of_trainer else ""


def _list_loaders(context: Context) -> list[BatchLoader]:
    """Return the data loaders that yielded before the peak, in order."""
    return [loader for loader in context.ledger.trace.loaders if loader.event <= context.ledger.peak_event]


def _saves_in_vain(context: Context) -> bool:
    """Return whether the call that the peak is in keeps a graph for a backward that is not to come: of a model in eval
    mode, or of a program whose code trains nothing."""
    trace = context.ledger.trace
    call = find_call_at(trace, context.ledger.peak_event)
    return call is not None and call.nodes > 0 and not (call.training and trace.may_train)


def _find_call_line(context: Context) -> str | None:
    """Return the own line that calls a module in the outermost call that the peak is in; None if it is in none."""
    trace = context.ledger.trace
    call = find_call_at(trace, context.ledger.peak_event)
    line = None if call is None else trace.source_at(call.source)
    return line if line is not None and is_own_source(line) else None


def _is_without_gradients(context: Context) -> bool:
    """Return whether the batches are of a script's inference, evaluation, of a call between its steps, or of one before
    it has an optimizer: none of these accumulates gradients."""
    if context.spec is not None:
        return False
    trace = context.ledger.trace
    has_optimizer = bool(trace.first_steps) or any(phase.kind is PhaseKind.OPTIMIZER_STEP for phase in trace.phases)
    is_before_training = trace.ended_out_of_memory and not has_optimizer and bool(trace.list_calls())
    is_called = is_inference(trace) or is_peak_in_evaluation(context) or is_before_training
    return is_called or find_call_between_steps(context) is not None


@cache_per_context
def _find_batches(context: Context) -> tuple[int, int, Trace] | None:
    """Return the batch size, the rows at a time that fit, and the trace with these; None if rows are not the change.

    If pairs fill the GPU, they can be computed in chunks, and a loss that compares samples stays the same.
    """
    trace = context.ledger.trace
    batch_size, chunks = find_batch_size(context), find_chunks(context)
    largest = context.lifetimes.find_largest_at_peak()
    if batch_size is None:
        return None
    if chunks is not None and chunks.sizes.get(largest, math.inf) < trace.storages[largest].num_bytes:
        return None
    batched = _find_batched(context, batch_size)
    if not batched:
        return None
    rows = find_fitting_rows(context, batched, batch_size)
    while batch_size % rows:  # a batch is divided into equal ones
        rows -= 1
    return batch_size, rows, _keep_gradients(resize_rows(trace, batched, rows, batch_size))


def _normalizes_batches(trace: Trace) -> bool:
    """Return whether a batch normalization keeps statistics of its batch for the backward: in eval mode none does.

    Instance normalization, which torch computes as that of a batch of one, sees each sample by itself.
    """
    return any(
        len(storage.shape) == 1 and storage.num_bytes and "batch_norm" in trace.op(storage)
        for storage in trace.storages
        if trace.phases[storage.phase].kind is PhaseKind.FORWARD
        if storage.module == NONE or "InstanceNorm" not in trace.modules[storage.module].class_name
    )


def find_batch_size(context: Context) -> int | None:
    """Return the number of samples: the first dimension of the model's inputs at the peak, or what the data loader
    yields if that divides them; None: 1, or not known."""
    if context.spec is not None:
        return context.spec.batch_size if context.spec.batch_size > 1 else None
    shapes = _list_input_shapes(context)
    # Samples and their beams, as rows; images of one channel have none.
    merged = {shape[0] * shape[1] for shape in shapes if len(shape) > 2 and shape[1] > 1}
    sizes = {shape[0] for shape in shapes} - merged
    yielded = [loader.batch_size for loader in _list_loaders(context)]
    if (repeated := _find_stacked_rows(context)) is not None and sizes.isdisjoint(yielded):
        return repeated
    sizes -= {size for size in sizes if size >= MIN_NODES and (size, size) in shapes}  # nodes of one graph
    is_of_loader = len(sizes) == 1 and not sizes.isdisjoint(yielded)
    if sizes and yielded and not is_of_loader:
        size = yielded[-1]  # crops, frames or both of a pair are rows of one sample
        if size > 1 and all(rows % size == 0 for rows in sizes):
            return size
    return sizes.pop() if len(sizes) == 1 else None


def _find_stacked_rows(context: Context) -> int | None:
    """Return the rows of the largest tensor at the peak, if an input stacks batches with as many samples together: the
    same ones, repeated, as of a model with dropout that is sampled."""
    trace = context.ledger.trace
    largest = trace.storages[context.lifetimes.find_largest_at_peak()].shape
    stacked = {
        math.prod(storage.shape[:2])
        for index, owner in trace.owners.items()
        if owner.role is Role.INPUT and trace.op(storage := trace.storages[index]) == "aten.stack"
    }
    return largest[0] if largest and largest[0] in stacked else None


def _list_input_shapes(context: Context) -> list[tuple[int, ...]]:
    """Return the shapes of the model's inputs that are live at the peak, or else when its last call began, without
    those with one row, and without masks [n x n] of n tokens."""
    trace, peak = context.ledger.trace, context.ledger.peak_event
    inputs = [index for index, owner in trace.owners.items() if owner.role is Role.INPUT]
    given = context.lifetimes.find_live(peak, inputs).storages
    if not given:
        begin = max((call.begin for call in trace.list_calls() if call.begin <= peak), default=peak)
        given = context.lifetimes.find_live(begin - 1, inputs).storages
    shapes = [trace.storages[index].shape for index in given]
    lengths = {size for shape in shapes if shape[:1] == (1,) for size in shape[1:]}
    masks = {(length, length) for length in lengths}
    return [shape for shape in shapes if shape and shape[0] > 1 and shape not in masks]


def _find_batched(context: Context, batch_size: int) -> list[int]:
    """Return the storages with the batch as a factor; none if samples are compared with each other (n x n).

    The factor is a dimension, or part of the first one, into which others are often merged. What accumulates over the
    calls of an evaluation has those of all batches. Where no gradients are accumulated, what is moved to the GPU is as
    much as is computed at a time.
    """
    trace = context.ledger.trace
    parameters = {trace.storages[index].shape for index in param_names(trace)}
    widths = {size for shape in parameters for size in shape}
    widths |= {size for shape in _list_input_shapes(context) for size in shape[1:]}
    batched = list(trace.optional_storages())  # workspaces of convolutions
    if _is_without_gradients(context):
        batched += [index for index in context.lifetimes.at_peak if _is_moved_batch(trace, index, batch_size)]
    num_others, kept_keys = len(batched), find_kept_keys(context)
    kinds = _EVALUATING if is_peak_in_evaluation(context) else _PHASES  # a training beside it stays as it is
    call = find_call_between_steps(context)
    since = 0 if call is None else call.begin
    for index, storage in enumerate(trace.storages):
        shape, owner = storage.shape, trace.owners.get(index)
        if (
            storage.hidden
            or not shape
            or shape in parameters
            or (owner is not None and owner.role is not Role.KV_CACHE)
        ):
            continue
        if trace.phases[storage.phase].kind not in kinds or (shape[0] % batch_size and batch_size not in shape):
            continue
        if context.lifetimes.births[index] < since:
            continue
        if kept_keys and make_key(trace, index) in kept_keys:
            continue
        if len(shape) > 1 and shape[0] == shape[1] and len(shape) < 4 and shape[0] not in widths:
            if shape[0] % batch_size == 0 and index in context.lifetimes.at_peak:
                return []
            continue
        batched.append(index)
    return batched if len(batched) > num_others else []


def _is_moved_batch(trace: Trace, index: int, batch_size: int) -> bool:
    """Return whether the storage is an input with so many rows that was moved to the GPU."""
    is_moved = trace.op(trace.storages[index]) == "aten._to_copy" and index in trace.owners
    return is_moved and trace.owners[index].role is Role.INPUT and trace.storages[index].shape[:1] == (batch_size,)


def _keep_gradients(trace: Trace) -> Trace:
    """Return the trace with gradients live from the beginning of their step, as those of the batches before are."""
    births, _ = trace.lifetimes()
    begins: dict[int, int] = {}
    for time, phase in trace.list_phase_begins():
        if phase.kind is PhaseKind.FORWARD:
            begins.setdefault(phase.step, time)
    inserted: dict[int, list[Event]] = defaultdict(list)
    removed = []
    for index, owner in trace.owners.items():
        begin = begins.get(trace.phases[trace.storages[index].phase].step, births[index])
        if owner.role is Role.GRADIENT and begin < births[index] < len(trace.events):
            removed.append(births[index])
            inserted[begin].append(Event(EventKind.ALLOC, index))
    return edit_events(trace, inserted, removed)
