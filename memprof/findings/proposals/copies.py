"""Proposes host memory for copies of parameters: of a checkpoint, an average, a reference."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.effect import has_host_memory
from memprof.findings.evidence import file_and_line, mask_compute_phases, param_names
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.findings.weight_snapshots import find_cloned_weights
from memprof.ledger.what_if import resize


@proposes(35)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if memory runs out while a line copies parameters, outside forward and backward, or storages of
    a state, of which no gradient is computed: also after a call of a model, before the next phase begins."""
    trace, oom = context.ledger.trace, context.ledger.out_of_memory
    if not has_host_memory(context) or oom is None or trace.op(failed := trace.storages[oom.storage]) != "aten.clone":
        return
    shapes = {trace.storages[index].shape for index in param_names(trace)}
    copies = [index for index, other in enumerate(trace.storages) if other.source == failed.source]
    is_outside = failed.shape in shapes and not mask_compute_phases(trace)[failed.phase]
    is_of_state = any(trace.storages[i].shape not in shapes for i in find_cloned_weights(context).intersection(copies))
    if not (is_outside or is_of_state):
        return
    line = trace.source_line(failed)
    change = f"the copies of parameters at {file_and_line(line)} in host memory (.cpu() of each)"
    yield Proposal(resize(trace, dict.fromkeys(copies, 0)), change, source=line)
