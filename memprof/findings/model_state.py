"""Rule `model-state`: a model whose parameters, or these with gradients and optimizer state, are more than the GPU."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, find_own_line, format_shape, param_names, percent
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.first_step import sum_missing
from memprof.findings.groups import fix_at
from memprof.findings.optimizer_state import STATE_ROLES, find_state
from memprof.findings.suggestions import list_fix_names, suggest
from memprof.ledger.ledger import find_live_storages
from memprof.trace.events import FirstStep, MovedModel, PhaseKind, Trace, is_own_source
from memprof.units import format_bytes, format_count

LARGE_SHARE = 0.5  # of the parameters' bytes: one that has as many is named


@rule(35)
def find(context: Context) -> list[Finding]:
    """Return at most one finding, where memory ended the run before the first optimizer step, or for a model by name;
    `num_bytes` is what the parameters alone take, or the least that a step needs."""
    trace, usable_bytes = context.ledger.trace, context.usable_bytes
    if usable_bytes is None or not (trace.ended_out_of_memory or context.spec):
        return []
    is_cut = trace.ended_out_of_memory
    model, step_bytes = trace.moved_model, _compute_step_bytes(context) if is_cut else _sum_at_last_step(context)
    evidence: tuple[Evidence, ...] = ()
    if model is not None and model.num_bytes > usable_bytes:
        count, num_bytes = format_count(model.num_parameters), model.num_bytes
        title = f"{model.class_name} has {count} parameters in {model.dtype}, {format_bytes(num_bytes)}"
        title += _describe_largest(trace, model.largest, model.largest_shape, model.largest_bytes, num_bytes)
        if model.largest_bytes > usable_bytes:
            evidence = _list_fixes(trace, model)
    elif step_bytes > usable_bytes:
        num_bytes = step_bytes
        title = "Parameters, gradients and optimizer state alone take "
        title += f"{'at least ' * is_cut}{format_bytes(num_bytes)}"
        title += _describe_largest_parameter(trace) if trace.first_steps else ""
    else:
        return []
    title += f": more than the {format_bytes(usable_bytes)} that the GPU has for them"
    found = suggest(context)
    fixes = list_fix_names(found)
    return [
        Finding(
            "model-state", Severity.WARNING, title, num_bytes, evidence, fixes, is_decisive=is_cut, suggestions=found
        )
    ]


def _list_fixes(trace: Trace, model: MovedModel) -> tuple[Evidence, ...]:
    """Return the change of the own line that makes a parameter which alone is larger than the GPU, if there is one."""
    line = _find_line(trace, model.largest_shape)
    if line is None or not is_own_source(line):
        return ()
    return (fix_at(line, f"make `{model.largest}` smaller: fewer features, such as by pooling before this layer"),)


def _compute_step_bytes(context: Context) -> int:
    """Return the least that the parameters of an optimizer that has made no step take with their gradients and state,
    without what else there is (other models); 0 if there is none. Of several optimizers the one that takes least."""
    trace, births = context.ledger.trace, context.lifetimes.births
    oom, made = context.ledger.out_of_memory, 0
    if oom is not None:
        begin, phase = max((one for one in context.phases if one[0] <= oom.event), key=lambda one: one[0])
        if phase.kind is PhaseKind.OPTIMIZER_STEP:  # which has made a part of its state
            new = (index for index in find_state(context) if births[index] >= begin and index != oom.storage)
            made = sum(trace.storages[index].num_bytes for index in new)
    return min((made + _sum_own(trace, step) for step in trace.first_steps), default=0)


def _sum_at_last_step(context: Context) -> int:
    """Return the bytes of parameters, gradients and optimizer state where the last optimizer step begins; 0 without."""
    trace = context.ledger.trace
    begins = [time for time, phase in context.phases if phase.kind is PhaseKind.OPTIMIZER_STEP]
    if not begins:
        return 0
    live = find_live_storages(trace, begins[-1], context.ledger.run.refused)
    owned = (index for index in live if index in trace.owners and trace.owners[index].role in STATE_ROLES)
    return sum(trace.storages[index].num_bytes for index in owned)


def _sum_own(trace: Trace, step: FirstStep) -> int:
    own = [index for index in step.parameters if trace.storages[index].device == trace.device]
    return sum(trace.storages[index].num_bytes for index in own) + sum_missing(trace, trace, step, None)


def _describe_largest_parameter(trace: Trace) -> str:
    """Return words for the parameter with at least LARGE_SHARE of the bytes of all that optimizers have; else none."""
    indices = {index for step in trace.first_steps for index in step.parameters}
    largest = max(indices, key=lambda index: trace.storages[index].num_bytes)
    if len(indices) == 1:
        return ""
    storage, total = trace.storages[largest], sum(trace.storages[index].num_bytes for index in indices)
    return _describe_largest(trace, param_names(trace)[largest], storage.shape, storage.num_bytes, total)


def _describe_largest(trace: Trace, name: str, shape: tuple[int, ...], num_bytes: int, total_bytes: int) -> str:
    """Return words for a parameter with at least LARGE_SHARE of the bytes, and the line that makes it; else none."""
    line = _find_line(trace, shape)
    if num_bytes < LARGE_SHARE * total_bytes or line is None:
        return ""
    place = f"`{name}` {format_shape(shape)}, made at {file_and_line(line)}"
    return f" ({percent(num_bytes, total_bytes)} of the parameters: {place})"


def _find_line(trace: Trace, shape: tuple[int, ...]) -> str | None:
    """Return the line that makes a parameter of this shape, before it is moved."""
    first = next((index for index, storage in enumerate(trace.storages) if storage.shape == shape), None)
    return None if first is None else find_own_line(trace, first)
