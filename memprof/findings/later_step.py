"""Rule `later-step`: a step needs more than all before it, as it does something for the first time, or what runs after
it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from memprof.findings import larger_batch
from memprof.findings.evaluation_accumulates import find_kept_storages
from memprof.findings.evaluation_with_gradients import find_covered_storages
from memprof.findings.evidence import file_and_line, find_call_at, is_peak_in_evaluation
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import fix_at
from memprof.findings.idle_storages import find_phase
from memprof.findings.suggestions import list_fix_names, suggest
from memprof.ledger.steps import list_training_steps
from memprof.trace.events import NONE, Forward, PhaseKind
from memprof.units import format_bytes

MIN_EARLIER_STEPS = 2
MIN_SHARE = 0.25  # of the peak: what the step allocates beyond all steps before it
MIN_LINE_SHARE = 0.05  # of the peak: what a new line has made there; its backward takes more
MIN_TIMES = 1.5  # as many autograd nodes in a call as in the steps before


@rule(56)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is what the step with the peak allocates more than any before it.

    What is there when a step begins is not counted, so that growth is no such step. It is decisive if memory has room
    for the other steps.
    """
    ledger, allocated = context.ledger, context.ledger.allocated
    if context.spec is not None or is_peak_in_evaluation(context) or not context.phases:
        return []
    call = find_call_at(ledger.trace, ledger.peak_event)
    if call is not None and not call.nodes:  # which trains nothing: an evaluation in training mode, samples
        return []
    phase, steps = find_phase(context.phases, ledger.peak_event), list_training_steps(ledger.trace, allocated)
    step = phase.step
    # One of several optimizers may have ended this step before the peak.
    is_after = phase.kind is PhaseKind.OTHER and any(one.step == step and one.end <= ledger.peak_event for one in steps)
    earlier = [one for one in steps if one.step < step + is_after]
    if len(earlier) < MIN_EARLIER_STEPS or larger_batch.find(context):
        return []
    begin = earlier[-1].end
    most = max(one.peak_bytes - (allocated[one.begin - 1] if one.begin else 0) for one in earlier)
    more_bytes = ledger.peak_bytes - allocated[begin - 1] - most
    if more_bytes < MIN_SHARE * ledger.peak_bytes:
        return []
    reason = _describe_new_line(context, begin, is_after=is_after) or (
        None if is_after else _describe_larger_graph(context, begin)
    )
    if reason is None:
        return []
    if not context.lifetimes.at_peak.isdisjoint(find_covered_storages(context) | find_kept_storages(context)):
        return []  # evaluations have findings of their own
    text, *fix = reason
    earlier_bytes = max(one.peak_bytes for one in earlier)
    peak_text, earlier_text = format_bytes(ledger.peak_bytes), format_bytes(earlier_bytes)
    title = (
        f"{peak_text} are allocated after step {step}, {earlier_text} at most in the steps: {text}"
        if is_after
        else f"Step {step} allocates {peak_text}, the steps before it {earlier_text} at most: {text}"
    )
    has_room = context.usable_bytes is not None and earlier_bytes <= context.usable_bytes
    severity = Severity.NOTE if ledger.run.fits else Severity.WARNING
    decides = has_room and not ledger.run.fits
    found = () if fix else suggest(context)
    names = list_fix_names(found)
    return [
        Finding("later-step", severity, title, more_bytes, tuple(fix), names, is_decisive=decides, suggestions=found)
    ]


def _describe_new_line(context: Context, begin: int, *, is_after: bool) -> tuple[str, Evidence] | None:
    """Return words for the line that makes most at the peak, of those that run from the event `begin` on for the first
    time, with the change; None if none makes much. `is_after`: after a step, such as an export."""
    trace, births = context.ledger.trace, context.lifetimes.births
    known = set(_list_lines(context, (index for index, birth in enumerate(births) if birth < begin)))
    made: Counter[int] = Counter()
    for index in context.lifetimes.at_peak:
        for new in set(_list_lines(context, [index])) - known:
            made[new] += context.lifetimes.sum_bytes([index])
    if not made:
        return None
    source, num_bytes = made.most_common(1)[0]
    if num_bytes < MIN_LINE_SHARE * context.ledger.peak_bytes:
        return None
    line = trace.source_at(source)
    if is_after:
        return f"{file_and_line(line)} runs for the first time", fix_at(line, "compute it in parts, or in host memory")
    fix = "for a part of the batch, or give it a backward of its own"
    calls = [
        one for one in trace.list_calls() if one.begin >= begin and one.nodes and source in (one.source, one.caller)
    ]
    backwards = [time for time, phase in context.phases if phase.kind is PhaseKind.BACKWARD and time >= begin]
    if calls and not any(time > calls[0].begin for time in backwards):
        fix = f"under torch.no_grad() if no backward follows, else {fix}"
    return f"it is the first that runs {file_and_line(line)}", fix_at(line, f"run it {fix}")


def _list_lines(context: Context, storages: Iterable[int]) -> Iterable[int]:
    """Yield the lines that made `storages`, and those of their callers that were recorded."""
    trace = context.ledger.trace
    for index in storages:
        if trace.storages[index].source != NONE:
            yield trace.storages[index].source
            yield from (caller.source for caller in trace.list_callers(index))


def _describe_larger_graph(context: Context, begin: int) -> tuple[str] | None:
    """Return words for the call with the most autograd nodes, if the same line made fewer in the steps before: its
    parameters were frozen. None if there is none."""
    trace = context.ledger.trace
    before: dict[tuple[int, int], int] = {}
    later: list[Forward] = []
    for call in trace.list_calls():
        if call.begin >= begin:
            later.append(call)
        else:
            before[call.module, call.source] = max(before.get((call.module, call.source), 0), call.nodes)
    known = (call for call in later if (call.module, call.source) in before and call.begin <= context.ledger.peak_event)
    largest = max(known, key=lambda call: call.nodes, default=None)
    if largest is None or largest.nodes < MIN_TIMES * max(before[largest.module, largest.source], 1):
        return None
    module, line = trace.modules[largest.module], file_and_line(trace.source_at(largest.source))
    return (
        f"the call of `{module.class_name}` at {line} keeps what it makes for the backward, as parameters that were "
        "frozen are trained from this step on",
    )
