"""Proposes host memory for copies of parameters: of a checkpoint, an average, a reference."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, mask_compute_phases, param_names
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize


@proposes(35)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if memory runs out while a line copies parameters, outside forward and backward."""
    trace, oom = context.ledger.trace, context.ledger.out_of_memory
    if oom is None:
        return
    failed = trace.storages[oom.storage]
    shapes = {trace.storages[index].shape for index in param_names(trace)}
    if trace.op(failed) != "aten.clone" or failed.shape not in shapes or mask_compute_phases(trace)[failed.phase]:
        return
    copies = [index for index, other in enumerate(trace.storages) if other.source == failed.source]
    change = f"the copies of parameters at {file_and_line(trace.source_line(failed))} in host memory (.cpu() of each)"
    yield Proposal(resize(trace, dict.fromkeys(copies, 0)), change)
