"""Proposes rows at a time for tensors of all pairs, which are larger than everything that they are computed from.

Pairs are of two sets that are broadcast, or of indices and all classes: a one_hot. In an evaluation, outside modules,
also of two sets that are multiplied; and images that are made larger are as good as pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memprof.findings.evidence import file_and_line, format_shape, is_inference, is_peak_in_evaluation, param_names
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, EventKind, ModuleRole, PhaseKind, Storage, Trace
from memprof.units import GIB

MIN_SHARE = 0.01  # of the peak: smaller tensors of pairs do not decide whether the run fits

_CHUNK_BYTES = GIB  # that the pairs of the rows at a time may take

# Operators whose result is larger than their operands only if these are broadcast; stack joins what was broadcast.
_ELEMENTWISE = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "stack")
_BROADCASTING = {f"aten.{name}" for name in _ELEMENTWISE}
_PRODUCTS = {"aten.mm", "aten.addmm"}
_BATCHED_PRODUCTS = {"aten.bmm", "aten.baddbmm"}
_RESIZING = "aten.upsample_"
_EYE, _ROWS = "aten.eye", "aten.index"  # torch.eye(classes)[indices]
_ONE_HOT = ("aten.zeros", _ROWS)  # the former of torch.nn.functional.one_hot

MIN_TABLE_ROWS = 1024  # of an embedding table, so that a size of the model is not taken for one

POINT_DIMS, MIN_POINTS = 4, 256  # of pairs within samples: images are as large in two dimensions, not made by pairs

MIN_IMAGE_DIMS = 4  # of a one_hot: [batch, height, width, classes], of which a loss needs one class at a time


class Chunks(NamedTuple):
    """Rows at a time of a tensor of pairs."""

    first: int  # the storage of all pairs
    axis: int  # the dimension of the rows
    rows: int  # at a time
    sizes: dict[int, int]  # storage -> bytes with so many rows: of the pairs, and of what is computed of them


@proposes(50)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the line that first makes the most pairs."""
    trace, chunks = context.ledger.trace, find_chunks(context)
    if chunks is None:
        return
    storage = trace.storages[chunks.first]
    is_trained = trace.trains or any(phase.kind is PhaseKind.BACKWARD for phase in trace.phases)
    may_be_trained = is_trained or (trace.ended_out_of_memory and not is_inference(trace))
    is_checkpointed = may_be_trained and not is_peak_in_evaluation(context)
    checkpointed = " (with gradients: each under torch.utils.checkpoint)" if is_checkpointed else ""
    is_difference = trace.op(storage) == "aten.sub" and len(storage.shape) == 3
    distances = " (for distances, torch.cdist)" * (is_difference and storage.shape[2] not in storage.shape[:2])
    # A product of two matrices is a batch of one in torch.einsum.
    is_product = trace.op(storage) in _BATCHED_PRODUCTS and storage.shape[0] == 1
    along = f" along dimension {chunks.axis}" if chunks.axis and not is_product else ""
    change = f"compute in chunks of {chunks.rows:,} of the {storage.shape[chunks.axis]:,} rows{along}{checkpointed}"
    change += ", and reduce each to what is needed of it before the next" * is_product
    is_square = len(storage.shape) < POINT_DIMS and storage.shape[0] == storage.shape[1]
    if is_square and not may_be_trained:  # candidates, such as boxes, with each other
        change += ", or select fewer rows first (such as torch.topk)"
    if trace.op(storage) in _ONE_HOT and len(storage.shape) >= MIN_IMAGE_DIMS:
        change = f"compare one class at a time (target == c) instead of this one_hot of all classes, or {change}"
    elif trace.op(storage) in _ONE_HOT:
        change = f"use a lookup (F.embedding) if this one_hot is multiplied by a matrix, else {change}"
    elif _has_scores_of_classes(trace, storage):
        change = f"resize the classes (after argmax) instead of the scores of all {storage.shape[1]}, or {change}"
    elif (product := _find_matrix_product(context, chunks.first)) is not None:
        change = f"use {product}, else {change}"
    elif is_of_each_sample(storage):
        change = f"compare each point with its nearest ones only, not with all {storage.shape[1]:,}; or {change}"
    elif may_be_trained and (table := _find_whole_table(trace, storage)) is not None:
        name, num_rows = table
        taken = f"the rows of `{name}` that the loss takes (sampled negatives), not with all {num_rows}"
        change = f"compare with {taken}; or {change}"
    place = f"{format_shape(storage.shape[is_product:])} at {file_and_line(trace.source_line(storage))}"
    yield Proposal(resize(trace, chunks.sizes), f"{change} ({place}){distances}", source=trace.source_line(storage))


def _find_whole_table(trace: Trace, storage: Storage) -> tuple[str, int] | None:
    """Return the name and the rows of an embedding table with all of whose rows `storage` has pairs; None: of none."""
    tables = {f"{module.path}.weight" for module in trace.modules if module.role is ModuleRole.EMBEDDING}
    for index, name in param_names(trace).items():
        shape = trace.storages[index].shape
        is_table = name in tables or "aten.embedding" in trace.ops
        if is_table and len(shape) == 2 and shape[0] >= MIN_TABLE_ROWS and shape[0] in storage.shape[:2]:
            return name, shape[0]
    return None


@cache_per_context
def find_chunks(context: Context) -> Chunks | None:
    """Return the chunks in which the most pairs are computed; None if there are no pairs."""
    trace, births = context.ledger.trace, context.lifetimes.births
    found = _find_pairs(context)
    if found is None:
        return None
    first, num_inputs = found
    storage = trace.storages[first]
    axis = _find_axis(trace, storage)
    num_rows = storage.shape[axis]
    num_pairs = math.prod(storage.shape[:-1])  # as rows of a linear layer
    related = [
        index
        for index, other in enumerate(trace.storages)
        if births[index] >= births[first] or other.source == storage.source
        if num_rows in other.shape[: axis + 2] or other.shape[:1] == (num_pairs,)
        if math.prod(other.shape) > num_inputs and index not in trace.owners
    ]
    num_chunks = -(-max(trace.storages[index].num_bytes for index in related) // _CHUNK_BYTES)
    rows = -(-num_rows // min(num_chunks, num_rows))
    sizes = {index: -(-trace.storages[index].num_bytes * rows // num_rows) for index in related}
    return Chunks(first, axis, rows, sizes)


def _find_axis(trace: Trace, storage: Storage) -> int:
    """Return the dimension of the rows: the first, or the second of a batched product. Of one sample it is the second
    of an image made larger, the third if that has scores of classes, and the first of several rows of a one_hot."""
    op = trace.op(storage)
    if op in _BATCHED_PRODUCTS or is_of_each_sample(storage):
        return 1
    if storage.shape[0] == 1 and op.startswith(_RESIZING):
        return 2 if _has_scores_of_classes(trace, storage) else 1
    if storage.shape[0] == 1 and op in _ONE_HOT:
        return next((axis for axis, size in enumerate(storage.shape[:-1]) if size > 1), 0)
    return 0


def _find_matrix_product(context: Context, index: int) -> str | None:
    """Return the matrix product that a sum of the elementwise products in the storage is: of outer products
    [rows, a, b] of tensors [rows, a] and [rows, b], or of features [n, m, features] of [n, features] and [m, features],
    which F.cosine_similarity divides by their norms; None if it has none of these."""
    trace, births = context.ledger.trace, context.lifetimes.births
    shape, op = trace.storages[index].shape, trace.op(trace.storages[index])
    if op not in ("aten.mul", "aten.div") or len(shape) != 3:
        return None
    live = context.lifetimes.find_live(births[index], range(index)).storages
    shapes = {trace.storages[other].shape for other in live}
    are_of_pairs = {shape[1:], shape[::2]} <= shapes
    if op == "aten.div":
        return "F.normalize(x) @ F.normalize(y).T for cosine similarities" if are_of_pairs else None
    if {shape[:2], shape[::2]} <= shapes:
        return "one matrix product (x.T @ y) if these products are summed over the rows"
    are_summed = "if these products are summed over the last dimension"
    return f"a matrix product (x @ y.T) {are_summed}" if are_of_pairs else None


def is_of_each_sample(storage: Storage) -> bool:
    """Return whether `storage` has features of all pairs of the points of each sample: [batch, n, n, features]."""
    shape = storage.shape
    return len(shape) == POINT_DIMS and shape[1] == shape[2] >= MIN_POINTS


def _has_scores_of_classes(trace: Trace, storage: Storage) -> bool:
    """Return whether `storage` is an image made larger, with a channel for each output of a convolution: of a softmax
    over these, all are needed for each pixel."""
    if not trace.op(storage).startswith(_RESIZING):
        return False
    shapes = (trace.storages[index].shape for index in param_names(trace))
    return any(len(shape) >= MIN_IMAGE_DIMS and shape[0] == storage.shape[1] for shape in shapes)


def _find_pairs(context: Context) -> tuple[int, int] | None:
    """Return the largest storage of all pairs that is computed from smaller ones, and the elements of the largest of
    these; None if there is none.

    The inputs of an operator are not recorded: no storage that is live when it runs has as many elements as its result.
    """
    trace = context.ledger.trace
    widths = {size for index in param_names(trace) for size in trace.storages[index].shape}
    chunked = {time for call in trace.vmaps for time in range(call.begin, call.end)}  # by chunk_size, if at all
    min_bytes = MIN_SHARE * context.ledger.peak_bytes
    in_evaluation = is_peak_in_evaluation(context)
    best: tuple[int, int] | None = None
    live: dict[int, int] = {}  # storage -> elements
    for time, (kind, index) in enumerate(trace.events):
        if kind is EventKind.ALLOC:
            storage = trace.storages[index]
            num_elements = math.prod(storage.shape)
            is_large = storage.num_bytes >= min_bytes and time not in chunked
            is_one_hot = is_large and _is_one_hot(trace, storage, live)
            if is_one_hot or (is_large and _may_be_pairs(trace, storage, widths, in_evaluation=in_evaluation)):
                # Stacked tensors may all be there; a one_hot is made of the indices alone.
                num_inputs = (sum if trace.op(storage) == "aten.stack" else max)([0, *live.values()])
                if is_one_hot:
                    num_inputs = num_elements // storage.shape[-1]
                if num_elements > max(num_inputs, 0 if best is None else math.prod(trace.storages[best[0]].shape)):
                    best = index, num_inputs
            live[index] = num_elements
        elif kind is EventKind.FREE:
            live.pop(index, None)
    return best


def _may_be_pairs(trace: Trace, storage: Storage, widths: set[int], *, in_evaluation: bool) -> bool:
    """Return whether the shape and the operator of `storage` are those of pairs; `widths`: sizes of parameters."""
    shape, op = storage.shape, trace.op(storage)
    if len(shape) < 2 or storage.device != trace.device or storage.hidden:
        return False
    if storage.module == NONE and shape[_find_axis(trace, storage)] > 1:
        if op in _BATCHED_PRODUCTS and len(shape) == 3 and shape[1] == shape[2] and shape[1] not in widths:
            return True
        if (in_evaluation or is_inference(trace)) and op.startswith(_RESIZING):
            return True
        is_search = in_evaluation or (bool(trace.list_calls()) and is_inference(trace))
        if is_search and op in _PRODUCTS and widths.isdisjoint(shape):
            return True
    if min(shape[:2]) < 2:
        return False
    if trace.phases[storage.phase].kind is PhaseKind.BACKWARD:
        return False
    is_square = len(shape) == 2 and shape[0] == shape[1] and shape[0] not in widths
    return op in _BROADCASTING or (op in _PRODUCTS and is_square)


def _is_one_hot(trace: Trace, storage: Storage, live: Iterable[int]) -> bool:
    """Return whether `storage` has a number for each class of each index in one of the `live` storages."""
    if trace.op(storage) not in _ONE_HOT or len(storage.shape) < 2:
        return False
    inputs = [trace.storages[index] for index in live]
    if trace.op(storage) == _ROWS:
        is_made = any(trace.op(one) == _EYE and one.shape == storage.shape[-1:] * 2 for one in inputs)
    else:
        is_made = storage.dtype == "int64"
    return is_made and any(one.dtype == "int64" and one.shape == storage.shape[:-1] for one in inputs)
