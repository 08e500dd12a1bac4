"""Proposes host memory for a tensor that the GPU uses in parts.

It is a buffer for results, or data of which a step takes some rows. Buffers of layers become smaller instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.effect import has_host_memory
from memprof.findings.evidence import file_and_line, format_shape, is_inference, names_of
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, PhaseKind, Role, Trace

MIN_SHARE = 0.25  # of the peak: smaller buffers are not what fills the GPU

MIN_ROWS = 64  # of data: fewer may be one batch

MIN_TIMES = 8  # as many bytes as what a tensor is made of, from which on it is not data: windows, repeated rows

_REPEATING = {f"aten.{name}" for name in ("index", "clone", "copy", "index_select", "gather", "embedding", "repeat")}
_CREATING = {f"aten.{name}" for name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")}
_PHASES = (PhaseKind.MODEL, PhaseKind.INPUTS, PhaseKind.OTHER)  # in which no gradient is computed of what is created


@proposes(95)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the line that creates the most at the peak, outside modules."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    buffers = [index for index in lifetimes.at_peak if _is_buffer(trace, index)]
    if not buffers or not has_host_memory(context):
        return
    largest = trace.storages[max(buffers, key=lambda index: trace.storages[index].num_bytes)]
    alike = [index for index in buffers if trace.storages[index].source == largest.source]
    where = f"{format_shape(largest.shape)} at {file_and_line(trace.source_line(largest))}"
    if _are_of_layers(context, alike):
        alike = [index for index in buffers if trace.storages[index].shape == largest.shape]
        length = largest.shape[0]
        if length > 1 and lifetimes.sum_bytes(alike) >= MIN_SHARE * context.ledger.peak_bytes:
            smaller = resize(trace, {index: trace.storages[index].num_bytes // length for index in alike})
            what = f"the first dimension (batch or length) of the buffer of each layer, {where}"
            change = f"reduce {what}: 1 instead of {length}"
            yield Proposal(smaller, change, source=trace.source_line(largest))
        return
    if lifetimes.sum_bytes(alike) < MIN_SHARE * context.ledger.peak_bytes or _is_used_whole(context, alike):
        return
    change = f'create {where} in host memory (device="cpu"), and copy parts of it to the GPU'
    yield Proposal(resize(trace, dict.fromkeys(alike, 0)), change, source=trace.source_line(largest))


@proposes(56)
def propose_data(context: Context) -> Iterator[Proposal]:
    """Yield the change for data with the most bytes at the peak, if no other tensor has as many rows."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    data = [index for index in lifetimes.at_peak if _may_be_data(trace, index)]
    largest = max(data, key=lambda index: trace.storages[index].num_bytes, default=None)
    oom, is_moving = context.ledger.out_of_memory, trace.moved_model is not None
    if largest is None or (is_moving and oom is not None and oom.storage == largest):  # a parameter
        return
    num_rows = trace.storages[largest].shape[0]
    alike = [index for index in data if trace.storages[index].shape[0] == num_rows]
    if lifetimes.sum_bytes(alike) < MIN_SHARE * context.ledger.peak_bytes:
        return
    birth = max(lifetimes.births[index] for index in alike)
    later = (one for one, born in zip(trace.storages, lifetimes.births, strict=True) if born > birth)
    if any(one.device == trace.device and (num_rows in one.shape or _has_rows(one.shape, num_rows)) for one in later):
        return
    storage = trace.storages[largest]
    where = f"{format_shape(storage.shape)} at {file_and_line(trace.source_line(storage))}"
    on_host = 'device="cpu"' if trace.op(storage) in _CREATING else ".cpu()"
    change = f"keep {where} in host memory ({on_host}), and move the rows of each step to the GPU"
    if _is_made_of_less(context, largest):
        change = f"make the rows of one step at a time, when it needs them, instead of all of {where}"
    yield Proposal(resize(trace, dict.fromkeys(alike, 0)), change, source=trace.source_line(storage))


def _are_of_layers(context: Context, buffers: list[int]) -> bool:
    """Return whether `buffers` are made between parameters: each layer has one for itself, such as a KV cache, whose
    size is a setting of the model."""
    births, parameters = context.lifetimes.births, names_of(context.ledger.trace, Role.PARAMETER)
    first, last = min(births[index] for index in buffers), max(births[index] for index in buffers)
    return any(first < births[index] < last for index in parameters)


def _is_made_of_less(context: Context, index: int) -> bool:
    """Return whether a storage repeats elements of tensors that are there when it is made: all of them together have
    less than 1 / MIN_TIMES of its bytes."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    storage, there = trace.storages[index], lifetimes.find_live(lifetimes.births[index], range(index))
    return trace.op(storage) in _REPEATING and there.num_bytes * MIN_TIMES < storage.num_bytes


def _may_be_data(trace: Trace, index: int) -> bool:
    storage, owner = trace.storages[index], trace.owners.get(index)
    is_own = storage.module == NONE and storage.source != NONE and not storage.hidden
    is_input = owner is None or owner.role is Role.INPUT
    is_matrix = len(storage.shape) == 2 and storage.shape[0] == storage.shape[1]  # of all rows with all
    is_long = bool(storage.shape) and storage.shape[0] >= MIN_ROWS and not is_matrix
    return is_own and is_input and is_long and trace.phases[storage.phase].kind in _PHASES


def _has_rows(shape: tuple[int, ...], num_rows: int) -> bool:
    """Return whether the rows of a tensor are made of `num_rows`: flattened."""
    return bool(shape) and shape[0] > 0 and shape[0] % num_rows == 0


def _is_used_whole(context: Context, buffers: list[int]) -> bool:
    """Return whether the GPU computes with a whole buffer: while it is live another tensor of its shape is made."""
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    shapes = {trace.storages[index].shape for index in buffers}
    others = [index for index, one in enumerate(trace.storages) if one.shape in shapes and not _is_buffer(trace, index)]
    return any(births[buffer] < births[other] < deaths[buffer] for buffer in buffers for other in others)


def _is_buffer(trace: Trace, index: int) -> bool:
    storage = trace.storages[index]
    is_own = index not in trace.owners and storage.module == NONE and storage.source != NONE and not storage.hidden
    has_no_gradient = trace.phases[storage.phase].kind in _PHASES or is_inference(trace)
    return is_own and has_no_gradient and trace.op(storage) in _CREATING
