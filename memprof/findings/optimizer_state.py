"""Rules on float32 optimizer state of half-precision parameters, and on temporaries of the optimizer step."""

from __future__ import annotations

from memprof.findings.evidence import (
    half_dtype_of,
    names_of,
    param_names,
    percent,
    plural,
    suggest_fixes,
    tensors_evidence,
)
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.ledger.categories import Category
from memprof.trace.events import PhaseKind, Role
from memprof.units import format_bytes

MIN_STATE_SHARE = 0.01  # of the peak: below it the state's precision does not matter (SGD without momentum, LoRA)

MIN_TEMPORARIES_SHARE = 0.05
MIN_TEMPORARIES_BYTES = 64 << 20  # found when they take more than both: that share of the peak, and so much


@rule(130)
def find(context: Context) -> list[Finding]:
    """Return findings for float32 state of half-precision parameters, and for temporaries that decide the peak."""
    return _find_float32_state(context) + _find_step_temporaries(context)


def _find_float32_state(context: Context) -> list[Finding]:
    """Return a finding for float32 state; `num_bytes` is the excess over half precision."""
    ledger, lives = context.ledger, context.lives
    half_dtype = half_dtype_of(context)
    if half_dtype is None:
        return []
    trace = ledger.trace
    # A state is its own parameter's: with some layers in float32 (norms, a router), so is theirs.
    full = {trace.storages[i].shape for i in param_names(trace) if trace.storages[i].dtype == "float32"}
    # Step counters are float32 scalars whatever the precision.
    names = names_of(trace, Role.OPTIMIZER_STATE)
    float32 = [i for i in names if trace.storages[i].dtype == "float32"]
    state = [i for i in float32 if trace.storages[i].shape and trace.storages[i].shape not in full]
    max_live = lives.find_max_live(state)
    excess_bytes = max_live.num_bytes // 2
    if excess_bytes <= MIN_STATE_SHARE * ledger.peak_bytes:
        return []
    title = (
        f"Optimizer state is float32 while the parameters are {half_dtype}: {format_bytes(max_live.num_bytes)}, "
        f"{format_bytes(excess_bytes)} more than in {half_dtype} ({percent(excess_bytes, ledger.peak_bytes)} of the peak)"
    )
    lines = tensors_evidence(context, state, max_live.event, names.__getitem__)
    fixes = suggest_fixes(context, "float32-optimizer-state")
    return [Finding("float32-optimizer-state", Severity.NOTE, title, excess_bytes, lines, fixes)]


def _find_step_temporaries(context: Context) -> list[Finding]:
    """Return a finding for temporaries; `num_bytes` is their size at the peak, an upper bound of the saving."""
    ledger, lives = context.ledger, context.lives
    if ledger.peak_stage.kind is not PhaseKind.OPTIMIZER_STEP:
        return []
    trace = ledger.trace
    temporaries = [
        index
        for index in sorted(lives.at_peak)
        if ledger.categories[index] is Category.TEMPORARIES
        and trace.phases[trace.storages[index].phase].kind is PhaseKind.OPTIMIZER_STEP
    ]
    num_bytes = lives.sum_bytes(temporaries)
    if num_bytes <= max(MIN_TEMPORARIES_BYTES, MIN_TEMPORARIES_SHARE * ledger.peak_bytes):
        return []
    title = (
        f"The optimizer step decides the peak: {plural(len(temporaries), 'temporary tensor')}, "
        f"{format_bytes(num_bytes)} live at once ({percent(num_bytes, ledger.peak_bytes)} of the peak)"
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
    fixes = suggest_fixes(context, "optimizer-step-temporaries")
    return [Finding("optimizer-step-temporaries", Severity.WARNING, title, num_bytes, tuple(lines), fixes)]
