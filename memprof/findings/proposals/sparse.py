"""Proposes sparse gradients of embeddings, and other forms of sparse products, where a gradient is computed as a dense
matrix, or is masked by one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape, names_of
from memprof.findings.finding import Context
from memprof.findings.optimizer_state import find_temporaries
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, EventKind, PhaseKind, Role, Storage, Trace

MAX_READ_SHARE = 0.1  # of the rows of a table: a sparse gradient has each row that a batch reads, with repetitions
_INDEX_BYTES = 8  # of an index of a sparse tensor, which is int64


@proposes(44, findings=("optimizer-step-temporaries",))
def propose_embeddings(context: Context) -> Iterator[Proposal]:
    """Yield the change if dense gradients of embeddings, of which a batch reads few rows, are as large as any tensor at
    the peak: gradients of these rows alone, in which the optimizer's step computes too.

    Not for language models, whose logits have a value for each row, and whose optimizers have no sparse form. State
    stays: that of SparseAdam is dense.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    widths = {storage.shape[-1] for storage in trace.storages if storage.shape}
    names, oom = names_of(trace, Role.GRADIENT), context.ledger.out_of_memory
    num_batches = max((phase.micro_batch for phase in trace.phases), default=1)
    rows_by_shape: dict[tuple[int, ...], int] = {}  # shape of a table -> rows that one step reads at most
    gradients: dict[int, int] = {}  # storage -> size in bytes of a sparse gradient
    for index, storage in enumerate(trace.storages):
        # The sum with another gradient, of tied weights, is a tensor of another operator.
        is_gradient = index in names or (oom is not None and index == oom.storage)
        num_rows = _count_lookups(trace, storage) * num_batches
        if is_gradient and 0 < num_rows <= MAX_READ_SHARE * storage.shape[0] and storage.shape[0] not in widths:
            rows_by_shape[storage.shape] = max(rows_by_shape.get(storage.shape, 0), num_rows)
            gradients[index] = _compute_sparse_bytes(storage, num_rows)
    if not gradients or trace.storages[lifetimes.find_largest_at_peak()].shape not in rows_by_shape:
        return
    temporaries = {
        index: _compute_sparse_bytes(storage, rows_by_shape[storage.shape])
        for index in find_temporaries(context)
        if (storage := trace.storages[index]).shape in rows_by_shape
    }
    tables = " and ".join(dict.fromkeys(f"`{names[index]}`" for index in gradients if names.get(index))) or "embeddings"
    shape, num_rows = max(rows_by_shape.items(), key=lambda item: math.prod(item[0]))
    change = (
        f"use nn.Embedding(..., sparse=True) for {tables}, of whose {shape[0]} rows a step reads {num_rows} at most, "
        "with torch.optim.SparseAdam, Adagrad or SGD in an optimizer of its own"
    )
    yield Proposal(resize(trace, gradients | temporaries), change)


def _count_lookups(trace: Trace, storage: Storage) -> int:
    """Return how many rows of a table were read, if `storage` is the table's dense gradient, else 0."""
    if trace.op(storage) != "aten.embedding_dense_backward" or storage.hidden or storage.forward_event == NONE:
        return 0
    kind, ref = trace.events[storage.forward_event]
    if kind is not EventKind.ALLOC or trace.op(trace.storages[ref]) != "aten.embedding":
        return 0
    return math.prod(trace.storages[ref].shape[:-1])


def _compute_sparse_bytes(storage: Storage, num_rows: int) -> int:
    """Return the size of `num_rows` rows of `storage`, with their indices."""
    return num_rows * (storage.num_bytes // storage.shape[0] + _INDEX_BYTES)


@proposes(47)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if a backward of sparse products makes a dense matrix, of which it keeps the nonzero elements.

    The matrix is a product, and the largest tensor at the peak. (PyTorch's mm_mat1_sparse_backward multiplies densely
    for COO, and samples for CSR.)
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    if not any(op.startswith("aten._sparse") for op in trace.ops):
        return
    largest = trace.storages[lifetimes.find_largest_at_peak()]
    if trace.op(largest) != "aten.mm" or trace.phases[largest.phase].kind is not PhaseKind.BACKWARD:
        return
    indices = (trace.storages[i].shape for i in lifetimes.at_peak if trace.storages[i].dtype == "int64")
    num_nonzero = max((shape[1] for shape in indices if len(shape) == 2 and shape[0] == 2), default=None)
    if num_nonzero is None:
        return
    alike = [i for i, other in enumerate(trace.storages) if (other.op, other.shape) == (largest.op, largest.shape)]
    num_bytes = largest.num_bytes // math.prod(largest.shape) * num_nonzero
    where = f"{format_shape(largest.shape)} at {file_and_line(trace.source_line(largest))}"
    change = (
        f"use a CSR matrix, or index_add of its {num_nonzero} elements, or no requires_grad if it is not trained, "
        f"instead of the dense gradient {where}"
    )
    yield Proposal(resize(trace, dict.fromkeys(alike, num_bytes)), change, source=trace.source_line(largest))


@proposes(49)
def propose_rows(context: Context) -> Iterator[Proposal]:
    """Yield the change if a backward of torch.sparse.sampled_addmm makes its mask dense, and that is the largest tensor
    at the peak: rows and columns of the operands, gathered for the nonzero elements, and their products.

    Operands are not recorded: none has more columns than the widest of the matrices that are live then.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    largest = trace.storages[lifetimes.find_largest_at_peak()]
    sampled = next((one for one in trace.storages if trace.op(one) == "aten.sparse_sampled_addmm"), None)
    if trace.op(largest) != "aten.sparse_mask" or sampled is None:
        return
    matrices = (trace.storages[index] for index in lifetimes.at_peak)
    width = max((min(one.shape) for one in matrices if len(one.shape) == 2 and one.dtype == sampled.dtype), default=1)
    masks = [index for index, one in enumerate(trace.storages) if trace.op(one) == "aten.sparse_mask" and one.hidden]
    sizes = dict.fromkeys(masks, 0) | {masks[0]: 3 * sampled.num_bytes * width}
    change = f"use (left[rows] * right.T[columns]).sum(1) of the {sampled.shape[0]} nonzero elements instead of "
    line = trace.source_line(sampled)
    where = f"torch.sparse.sampled_addmm at {file_and_line(line)}"
    yield Proposal(resize(trace, sizes), f"{change}{where}, whose backward makes the mask dense", source=line)
