"""Rule `frozen-in-vain`: `module.requires_grad = False` sets an attribute, and the module is trained all the same."""

from __future__ import annotations

from collections import defaultdict

from memprof.findings.effect import compute_needs_without, is_decisive
from memprof.findings.evidence import file_and_line, names_of, plural, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.groups import fix_at
from memprof.trace.events import FrozenInVain, Role
from memprof.units import format_bytes

_MOST_SHOWN = 3


@rule(73)
def find(context: Context) -> list[Finding]:
    """Return one finding for each line; `num_bytes` is the reduction of the peak without the gradients alone, or
    the parameters, if these gradients decide whether the run fits."""
    by_line: dict[str | None, list[FrozenInVain]] = defaultdict(list)
    for frozen in context.ledger.trace.frozen_in_vain:
        by_line[frozen.source].append(frozen)
    findings = (_make_finding(context, source, frozen) for source, frozen in by_line.items())
    return [finding for finding in findings if finding is not None]


def _make_finding(context: Context, source: str | None, frozen: list[FrozenInVain]) -> Finding | None:
    """Return the finding; None if the parameters get no gradients, and not because memory runs out before."""
    trace = context.ledger.trace
    modules = [trace.modules[one.module] for one in frozen]
    parameters = sorted({index for one in frozen for index in one.parameters if index in trace.owners})
    names = {trace.owners[index].name for index in parameters}
    gradients = [index for index, name in names_of(trace, Role.GRADIENT).items() if name in names]
    if not parameters or not (gradients or trace.ended_out_of_memory):
        return None
    shown = ", ".join(f"`{module.path or 'model'}`" for module in modules[:_MOST_SHOWN])
    more = f" and {len(modules) - _MOST_SHOWN} more" * (len(modules) > _MOST_SHOWN)
    classes = ", ".join(sorted({module.class_name for module in modules}))
    place = "" if source is None else f" at {file_and_line(source)}"
    title = (
        f"`requires_grad = False`{place} on {shown}{more} ({classes}) sets an attribute of the module and freezes "
        f"nothing: {plural(len(parameters), 'parameter')} ({format_bytes(context.lifetimes.sum_bytes(parameters))}) "
        "are trained, with their activations, gradients and optimizer state"
    )
    fix = "call the method: module.requires_grad_(False)"
    evidence = [Evidence(f"fix: {fix}") if source is None else fix_at(source, fix)]
    largest = max(parameters, key=lambda index: trace.storages[index].num_bytes)
    evidence.append(tensor_evidence(trace, largest, f"the largest of them: {trace.owners[largest].name}"))
    saved_bytes = context.lifetimes.peak_reduction(context.lifetimes.savings(gradients)) if gradients else 0
    needs = None
    if gradients and not context.ledger.run.fits:
        needs = compute_needs_without(context, gradients)
    decides = is_decisive(context, needs)
    # That they are trained is an error of the program: it comes before what else would let the run get on.
    num_bytes = max(saved_bytes, context.lifetimes.sum_bytes(parameters)) if decides else saved_bytes
    return Finding(
        "frozen-in-vain", Severity.WARNING, title, num_bytes or None, tuple(evidence), (), is_decisive=decides
    )
