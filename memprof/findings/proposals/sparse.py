"""Proposes other forms of sparse products, where the gradient of a sparse COO matrix is computed as a dense one."""

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
