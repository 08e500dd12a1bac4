"""Rules `float32-optimizer-state` (of half-precision parameters) and `optimizer-step-temporaries` (at the peak)."""

from __future__ import annotations

import math

from memprof.allocator import MemoryNeeds
from memprof.findings.effect import compute_needs_of, is_decisive
from memprof.findings.evidence import find_half, names_of, param_names, percent, plural, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, cache_per_context, rule
from memprof.findings.suggestions import list_fix_names, suggest_against
from memprof.ledger.what_if import resize
from memprof.trace.events import PhaseKind, Role, Trace
from memprof.units import format_bytes

STATE_ROLES = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)  # what an optimizer step leaves

MIN_STATE_SHARE = 0.01  # of the peak: the precision of smaller state does not matter (SGD without momentum, LoRA)

MIN_TEMPORARIES_SHARE = 0.05  # of the peak; reported if temporaries take more than this share and these bytes
MIN_TEMPORARIES_BYTES = 64 << 20


@rule(130)
def find(context: Context) -> list[Finding]:
    """Return findings for float32 state of half-precision parameters, and for temporaries that determine the peak."""
    return _find_float32_state(context) + _find_step_temporaries(context)


def _find_float32_state(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is what float32 optimizer state takes beyond half precision."""
    ledger, lifetimes = context.ledger, context.lifetimes
    half_dtype = find_half(context)
    if half_dtype is None:
        return []
    trace = ledger.trace
    # Some parameters may be float32 (norms, a router); their state, with the same shapes, is float32 too.
    full = {trace.storages[i].shape for i in param_names(trace) if trace.storages[i].dtype == "float32"}
    # Step counters are always float32 scalars, and are excluded by their shape.
    names = names_of(trace, Role.OPTIMIZER_STATE)
    float32 = [i for i in names if trace.storages[i].dtype == "float32"]
    state = [i for i in float32 if trace.storages[i].shape and trace.storages[i].shape not in full]
    max_live = lifetimes.find_max_live(state)
    excess = max_live.num_bytes // 2
    if excess <= MIN_STATE_SHARE * ledger.peak_bytes:
        return []
    title = (
        f"Optimizer state is float32 while the parameters are {half_dtype}: {format_bytes(max_live.num_bytes)}, "
        f"{format_bytes(excess)} more than in {half_dtype} ({percent(excess, ledger.peak_bytes)} of the peak)"
    )
    lines = tensors_evidence(context, state, max_live.event, names.__getitem__)
    found = suggest_against(context, "float32-optimizer-state")
    fixes = list_fix_names(found)
    return [Finding("float32-optimizer-state", Severity.NOTE, title, excess, lines, fixes, suggestions=found)]


def _find_step_temporaries(context: Context) -> list[Finding]:
    """Return at most one finding, if the peak is in the optimizer step; `num_bytes` is the temporaries' size there."""
    ledger, lifetimes = context.ledger, context.lifetimes
    if ledger.peak_stage.kind is not PhaseKind.OPTIMIZER_STEP:
        return []
    trace = ledger.trace
    temporaries = [index for index in find_temporaries(context) if index in lifetimes.at_peak]
    num_bytes = lifetimes.sum_bytes(temporaries)
    owned = (index for index in lifetimes.at_peak if index in trace.owners)
    state_bytes = lifetimes.sum_bytes(index for index in owned if trace.owners[index].role in STATE_ROLES)
    if num_bytes <= max(MIN_TEMPORARIES_BYTES, MIN_TEMPORARIES_SHARE * ledger.peak_bytes):
        return []
    title = (
        f"The optimizer step decides the peak: {plural(len(temporaries), 'temporary tensor')}, "
        f"{format_bytes(num_bytes)} live at once ({percent(num_bytes, ledger.peak_bytes)} of the peak), beside "
        f"{format_bytes(state_bytes)} of parameters, gradients and optimizer state"
    )
    other_stages = [stage for stage in ledger.stages if stage.kind is not PhaseKind.OPTIMIZER_STEP]
    lines = list(tensors_evidence(context, temporaries, ledger.peak_event, lambda index: "temporary of the step"))
    if other_stages:
        next_stage = max(other_stages, key=lambda stage: stage.peak_allocated_bytes)
        text = f"the next highest stage is {next_stage.name} with {format_bytes(next_stage.peak_allocated_bytes)}"
        lines.append(Evidence(text, num_bytes=next_stage.peak_allocated_bytes))
    if trace.updates_parameters_manually:
        text = "fix: update one parameter after another, or by an optimizer of torch.optim with fused=True"
        lines.append(Evidence(text, source=trace.source_line(trace.storages[temporaries[0]])))
    found = suggest_against(context, "optimizer-step-temporaries")
    # In a later step something else has grown, if memory runs out there.
    is_first = sum(phase.kind is PhaseKind.OPTIMIZER_STEP for _, phase in context.phases) == 1
    is_known = is_first or not trace.ended_out_of_memory
    decides = is_known and not ledger.run.fits and is_decisive(context, _compute_needs_without_temporaries(context))
    severity = Severity.NOTE if ledger.run.fits else Severity.WARNING  # torch's own default: no fault of the program
    return [
        Finding(
            "optimizer-step-temporaries",
            severity,
            title,
            num_bytes,
            tuple(lines),
            list_fix_names(found),
            is_decisive=decides,
            suggestions=found,
        )
    ]


def _compute_needs_without_temporaries(context: Context) -> MemoryNeeds:
    return compute_needs_of(context, resize(context.ledger.trace, dict.fromkeys(find_temporaries(context), 0)))


@cache_per_context
def find_state(context: Context) -> dict[int, int]:
    """Return storage -> number of elements of optimizer state on the GPU, but for step counts.

    It includes state that the step is about to make where memory runs out: the optimizer has it only afterwards.
    """
    trace = context.ledger.trace
    shapes = {trace.storages[index].shape for index in param_names(trace)}
    state = {}
    for index, storage in enumerate(trace.storages):
        owner = trace.owners.get(index)
        is_new = owner is None and _is_in_step(trace, index) and trace.op(storage) == "aten.zeros_like"
        if (is_new or (owner is not None and owner.role is Role.OPTIMIZER_STATE)) and storage.shape in shapes:
            state[index] = math.prod(storage.shape)
    return state


@cache_per_context
def find_temporaries(context: Context) -> list[int]:
    """Return the storages that an optimizer's step makes for itself."""
    trace, state = context.ledger.trace, find_state(context)
    return [
        index
        for index, storage in enumerate(trace.storages)
        if _is_in_step(trace, index) and index not in trace.owners and index not in state and not storage.hidden
    ]


def _is_in_step(trace: Trace, index: int) -> bool:
    return trace.phases[trace.storages[index].phase].kind is PhaseKind.OPTIMIZER_STEP
