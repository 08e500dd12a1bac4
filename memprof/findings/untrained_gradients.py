"""Rule `untrained-gradients`: gradients are computed for parameters that no optimizer has."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from typing import NamedTuple

from memprof.findings.edits import Edit, EditKind
from memprof.findings.effect import compute_needs_of, effect_evidence, is_decisive
from memprof.findings.evidence import file_and_line, plural, tensors_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.idle_storages import find_phase
from memprof.findings.lifetimes import Saving
from memprof.ledger.what_if import free_earlier, resize
from memprof.trace.events import EventKind, Forward, PhaseKind, Role, Trace
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.05  # of the peak: found if the peak would be lower by at least this and MIN_BYTES

# Of optimizers: in the first step, gradients may wait for an optimizer that the program has yet to build. Where memory
# runs out after it, and no optimizer waits for its first step, none has them.
MIN_STEPS = 2

_MOST_SHOWN = 3


@rule(75)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the reduction of the peak without the gradients, and without what
    autograd saves for these alone.

    Where memory runs out before there are gradients, or in the first step, a call in eval mode says as much as these,
    and so does that of a copy of a module that is trained: a target network or a teacher, which follows it.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    discarded = [] if trace.untrained_gradients else trace.discarded_gradients
    gradients = [
        index for index in (*trace.untrained_gradients, *discarded) if trace.storages[index].device == trace.device
    ]
    if any(_is_read(context, index) for index in gradients):
        return []
    saved = _find_saved(context)
    steps = {phase.step for _, phase in context.phases if phase.kind is PhaseKind.OPTIMIZER_STEP}
    call = _find_call(context, [*saved, *gradients])
    waits = not trace.ended_out_of_memory or bool(trace.first_steps) or not steps
    is_early = not gradients or (waits and len(steps) < MIN_STEPS)
    copied = _find_copied_module(trace) if is_early and trace.ended_out_of_memory else None
    in_eval_mode = call is not None and not call.training and _leads_to_none(context, call)
    if is_early and not (trace.ended_out_of_memory and (in_eval_mode or copied is not None)):
        return []
    unsaved = [Saving(time, lifetimes.deaths[i], lifetimes.sum_bytes([i])) for i, time in saved.items()]
    num_bytes = lifetimes.peak_reduction([*lifetimes.savings(gradients), *unsaved])
    if num_bytes < MIN_BYTES or num_bytes < MIN_SHARE * context.ledger.peak_bytes:
        return []
    max_live, max_saved = lifetimes.find_max_live(gradients), lifetimes.find_max_live(saved)
    source = None if call is None else trace.source_at(call.source)
    line = file_and_line(source)
    name = "" if call is None else f" of {trace.modules[call.module].class_name}, called at {_name_line(trace, call)},"
    changed = free_earlier(resize(trace, dict.fromkeys(gradients, 0)), saved)
    needs = compute_needs_of(context, changed)
    decides = is_decisive(context, needs)
    num_parameters = len(max_live.storages)
    gets = "gets a gradient" if num_parameters == 1 else "get gradients"
    fate = "that are set to None before their optimizer makes a step" if discarded else "that no optimizer uses"
    title = f"{plural(num_parameters, 'parameter')}{name} {gets} {fate}: {format_bytes(max_live.num_bytes)}"
    if is_early and call is not None:
        what = f"{trace.modules[call.module].class_name} is called in eval mode at {line}, with gradients, and no"
        if copied is not None and not in_eval_mode:
            source = copied.source
            line = file_and_line(source)
            what = f"{copied.name}, which is made as {copied.original} is, is called at {line} with gradients, and no"
        title = f"{what} optimizer has its parameters: {format_bytes(max_saved.num_bytes)} are saved for a backward"
    fix, edit = f"call requires_grad_(False) on {_name_parameters(context, gradients)}", None
    if call is not None and source is not None and (copied is not None or _leads_to_none(context, call)):
        fix, edit = f"call it under torch.no_grad() at {line}, or {fix}", Edit(EditKind.NO_GRADIENTS, source)
    else:
        fix = f"{fix}, where the model is built"
    if discarded:
        place = "" if call is None else f" at {line}"
        fix = (
            f"fix: call it under torch.no_grad(){place}, or take .detach() of what it returns, where it is an input of "
            "the other model's loss"
        )
    else:
        other = "" if in_eval_mode else "; or give these parameters to the optimizer if they are to be trained"
        fix = f"fix: {fix}{other}"
    lines = (
        Evidence(fix, source=None if edit is None else source),
        effect_evidence(context, needs, "without these gradients, and what autograd saves for them alone"),
        *tensors_evidence(context, gradients, max_live.event, lambda index: "gradient")[:_MOST_SHOWN],
        *tensors_evidence(context, saved, max_saved.event, lambda index: "saved")[:_MOST_SHOWN],
    )
    return [
        Finding("untrained-gradients", Severity.WARNING, title, num_bytes, lines, (), is_decisive=decides, edit=edit)
    ]


def _name_line(trace: Trace, call: Forward) -> str:
    """Return the line of a call, with the line that calls its function if several do, as with several models."""
    line, caller = file_and_line(trace.source_at(call.source)), trace.source_at(call.caller)
    callers = {other.caller for other in trace.list_calls() if other.source == call.source}
    return line if caller is None or len(callers) == 1 else f"{line} from {file_and_line(caller)}"


def _is_read(context: Context, index: int) -> bool:
    """Return whether the program has used the gradient `index` itself, as an update by hand or clipping does."""
    used = context.ledger.trace.last_uses[index]
    return used > context.lifetimes.births[index] and find_phase(context.phases, used).kind is not PhaseKind.BACKWARD


def _find_saved(context: Context) -> dict[int, int]:
    """Return storage -> event at which the forward is done with it, of what autograd alone keeps, and for these
    gradients alone."""
    trace, births = context.ledger.trace, context.lifetimes.births
    outputs = {index for forward in trace.forwards for index in forward.outputs}  # variables may keep them
    # Where memory runs out, a backward that was to come has used nothing yet.
    kept = context.lifetimes.at_peak if trace.ended_out_of_memory else frozenset()
    return {
        index: _find_end_of_use(trace, births[index], used)
        for span in trace.untrained_spans
        for index, used in zip(span.storages, span.last_uses, strict=True)
        if index not in outputs
        and (index in kept or find_phase(context.phases, trace.last_uses[index]).kind is PhaseKind.BACKWARD)
    }


def _find_end_of_use(trace: Trace, birth: int, used: int) -> int:
    """Return the event at which a tensor that is last used at the event `used` is dropped: what is given to a module
    lives as long as the call."""
    depth = 0
    for time in range(birth, len(trace.events)):
        if time >= used and not depth:
            return time
        kind = trace.events[time].kind
        depth = depth + 1 if kind is EventKind.ENTER else max(depth - (kind is EventKind.EXIT), 0)
    return len(trace.events)


def _find_call(context: Context, storages: list[int]) -> Forward | None:
    """Return the last outermost call of those, alike in module and line, in which most bytes of `storages` were made,
    or what they are gradients of."""
    trace, births = context.ledger.trace, context.lifetimes.births
    forwards = trace.list_calls()
    calls: dict[tuple[int, int], Forward] = {}
    sizes: Counter[tuple[int, int]] = Counter()
    for index in storages:
        event = max(births[index] if index not in trace.owners else trace.storages[index].forward_event, 0)
        position = bisect.bisect_right(forwards, event, key=lambda forward: forward.begin) - 1
        if position >= 0 and event < (call := forwards[position]).end:
            calls[call.module, call.source] = call
            sizes[call.module, call.source] += trace.storages[index].num_bytes
    return calls[sizes.most_common(1)[0][0]] if calls else None


class _Copied(NamedTuple):
    """A module of no optimizer that is made as one that is trained, as a target network is, or a teacher."""

    name: str
    original: str
    source: str | None  # the line that calls it


def _find_copied_module(trace: Trace) -> _Copied | None:
    """Return the module that is called in the largest of the spans for untrained parameters, if it has the parts of
    another one that is called elsewhere, with gradients."""
    spans = [span for span in trace.untrained_spans if trace.events[span.begin].kind is EventKind.ENTER]
    if not spans:
        return None
    span = max(spans, key=lambda span: sum(trace.storages[index].num_bytes for index in span.storages))
    module = trace.events[span.begin].ref
    parts = _list_parts(trace, module)
    outside = {
        event.ref
        for time, event in enumerate(trace.events)
        if event.kind is EventKind.ENTER and not any(one.begin <= time < one.end for one in trace.untrained_spans)
    }
    twins = [other for other in outside - {module} if len(parts) > 1 and _list_parts(trace, other) == parts]
    lines = [call.source for call in trace.inner_calls if call.module == module]
    lines += [call.source for call in trace.list_calls() if call.module == module]
    if not twins or not lines:
        return None
    return _Copied(_name(trace, module), _name(trace, min(twins)), trace.source_at(lines[0]))


def _list_parts(trace: Trace, module: int) -> list[tuple[str, str]]:
    """Return path within `module` and class of all modules in it, and of itself."""
    root = trace.modules[module]
    prefix = f"{root.path}." if root.path else ""
    inner = itertools.takewhile(lambda one: one.path and one.path.startswith(prefix), trace.modules[module + 1 :])
    return [("", root.class_name), *((one.path[len(prefix) :], one.class_name) for one in inner)]


def _name(trace: Trace, module: int) -> str:
    """Return the path of a module, or, of one that is no part of another, its class."""
    return f"`{trace.modules[module].path}`" if trace.modules[module].path else trace.modules[module].class_name


def _leads_to_none(context: Context, call: Forward) -> bool:
    """Return whether no call at the line of `call` leads to a parameter that an optimizer has."""
    trace = context.ledger.trace
    return all(
        any(span.begin <= other.begin and other.end <= span.end for span in trace.untrained_spans)
        for other in trace.forwards
        if other.source == call.source and other.nodes
    )


def _name_parameters(context: Context, gradients: list[int]) -> str:
    """Return the parts of the model that have the parameters, those with most bytes first; of parts with others too, as
    of adapters, that only these are meant."""
    trace = context.ledger.trace
    sizes: Counter[str] = Counter()
    own = {trace.owners[index].name for index in gradients if index in trace.owners}
    for index in gradients:
        owner = trace.owners.get(index)
        if owner is not None and owner.name:
            sizes[owner.name.partition(".")[0]] += trace.storages[index].num_bytes
    names = [f"`{name}`" for name, _ in sizes.most_common()]
    more = [f"{len(names) - _MOST_SHOWN} more"] * (len(names) > _MOST_SHOWN)
    parts = ", ".join([*names[:_MOST_SHOWN], *more])
    parameters = (owner.name for owner in trace.owners.values() if owner.role is Role.PARAMETER)
    has_others = any(name not in own and name.partition(".")[0] in sizes for name in parameters)
    return f"the parameters of {parts} that are not trained" if has_others else parts or "its parameters"
