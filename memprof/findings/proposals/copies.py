"""Proposes host memory for copies of parameters: of a checkpoint, an average, a reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memprof.findings.effect import has_host_memory
from memprof.findings.evidence import file_and_line, mask_compute_phases, param_names
from memprof.findings.finding import Context
from memprof.findings.idle_storages import find_phase
from memprof.findings.suggestions import Proposal, proposes
from memprof.findings.weight_snapshots import find_cloned_weights
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, PhaseKind

MIN_SHARE = 0.1  # of the peak, that copies take which no pass uses: what takes less is not what fills the GPU


@proposes(34, findings=("float32-optimizer-state", "optimizer-step-temporaries"))
def propose_unused(context: Context) -> Iterator[Proposal]:
    """Yield the change if memory runs out in a backward or an optimizer's step, for the copies of weights that no
    forward has used until then, as those of an average."""
    trace, lifetimes, oom = context.ledger.trace, context.lifetimes, context.ledger.out_of_memory
    if not has_host_memory(context) or oom is None or not trace.last_uses:
        return
    if trace.phases[trace.storages[oom.storage].phase].kind not in (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP):
        return
    by_source: dict[int, list[int]] = defaultdict(list)
    of_models = {index for index in param_names(trace) if trace.op(trace.storages[index]) == "aten.clone"}
    for index in lifetimes.at_peak & (of_models | find_cloned_weights(context)):
        if trace.last_uses[index] == NONE or not find_phase(context.phases, trace.last_uses[index]).kind.computes:
            by_source[trace.storages[index].source].append(index)
    copies = max(by_source.values(), key=lifetimes.sum_bytes, default=[])
    if not copies or lifetimes.sum_bytes(copies) < MIN_SHARE * context.ledger.peak_bytes:
        return
    line = trace.source_line(trace.storages[copies[0]])
    change = f"move the copy of the model made at {file_and_line(line)} to host memory (.cpu()): no pass has used it"
    yield Proposal(resize(trace, dict.fromkeys(copies, 0)), change, source=line)


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
    change = f"move the copies of parameters made at {file_and_line(line)} to host memory (.cpu() of each)"
    yield Proposal(resize(trace, dict.fromkeys(copies, 0)), change, source=line)
