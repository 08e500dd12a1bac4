"""Proposes other forms of sparse products, where a gradient is computed as a dense matrix, or is masked by one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import PhaseKind


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
        f"a CSR matrix, or index_add of its {num_nonzero} elements, or no requires_grad if the matrix is not trained, "
        f"instead of the dense gradient {where}"
    )
    yield Proposal(resize(trace, dict.fromkeys(alike, num_bytes)), change)


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
    change = f"(left[rows] * right.T[columns]).sum(1) of the {sampled.shape[0]} nonzero elements instead of "
    where = f"torch.sparse.sampled_addmm at {file_and_line(trace.source_line(sampled))}"
    yield Proposal(resize(trace, sizes), f"{change}{where}, whose backward makes the mask dense")
