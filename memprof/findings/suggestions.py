"""Suggestions: changes of the program whose effect on the recorded run a replay of the allocator has shown.

Each file of `proposals/` has rules, which yield the changes that they see in a run: what to change, and the trace that
the run would have left then. What they would save is computed here, and what saves too little is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from memprof.allocator import AllocatorConfig, compute_memory_needs, replay_in_host_memory
from memprof.findings.evidence import is_applicable
from memprof.findings.finding import Context, Suggestion, cache_per_context
from memprof.findings.first_step import compute_first_step_bytes
from memprof.fixes.catalog import FIXES, Fix, find_conflict
from memprof.ledger.what_if import compute_allocated_peak, resize
from memprof.trace.events import Trace
from memprof.units import format_bytes

MAX_SUGGESTIONS = 3
# Of the run's need: a change that saves less, and does not make the run fit, is not suggested. A run that memory ended
# would end at the next allocation.
MIN_SHARE = 0.05

MIN_CURED_SHARE = 0.25  # of what a run that memory ended needs, so that what a change takes away is the cause


class Proposal(NamedTuple):
    """A change of the program, and the trace that the run would have left with this change."""

    trace: Trace
    # What to change in the program's own code; "": the rule's fix makes the change, and so it does if there is a value.
    change: str = ""
    value: int | None = None  # of the fix's main option
    config: AllocatorConfig | None = None  # settings of the allocator; None: those of the run
    source: str | None = None  # `file:line function` that the change is about


_Propose = Callable[[Context], Iterator[Proposal]]


class ProposalRule(NamedTuple):
    """A rule for proposals; `proposes` explains the fields."""

    order: int
    fix: str | None
    findings: tuple[str, ...]
    cures: tuple[str, ...]
    propose: _Propose


PROPOSAL_RULES: dict[int, ProposalRule] = {}  # order -> rule


def proposes(
    order: int, *, fix: str | None = None, findings: tuple[str, ...] = (), cures: tuple[str, ...] = ()
) -> Callable[[_Propose], _Propose]:
    """Return a decorator that registers a rule for proposals. Raises ValueError if another rule has the same `order`.

    Args:
        order: sorts rules by the cost of their changes, least first.
        fix: the fix that makes the change; the rule is asked only if the run could apply it.
        findings: ids of the findings that show these suggestions too.
        cures: ids of those that show them, and whose tensors the change takes away.
    """

    def register(propose: _Propose) -> _Propose:
        if order in PROPOSAL_RULES:
            raise ValueError(f"{PROPOSAL_RULES[order].propose.__module__} has place {order}: {propose.__module__}")
        PROPOSAL_RULES[order] = ProposalRule(order, fix, findings, cures, propose)
        return propose

    return register


class _Candidate(NamedTuple):
    """A proposal with an estimate of its effect, which costs less than a replay."""

    rule: ProposalRule
    proposal: Proposal
    required_bytes: int
    fits: bool


def suggest(context: Context) -> tuple[Suggestion, ...]:
    """Return the best suggestions: those with which the run fits, the least costly first, then the most bytes.

    Where none of them makes the run fit, their combination is the first.
    """

    def rank(rule: ProposalRule, fits: bool | None, required_bytes: int) -> tuple[int, int]:
        return (0, rule.order) if fits else (1, required_bytes)

    candidates = sorted(_list_candidates(context), key=lambda one: rank(one.rule, one.fits, one.required_bytes))
    found = _evaluate_first(context, candidates)
    found.sort(key=lambda pair: rank(pair[0].rule, pair[1].fits, pair[1].required_bytes))
    suggestions = tuple(suggestion for _, suggestion in found)
    if any(suggestion.fits is not False for suggestion in suggestions):
        return suggestions
    return (*_combine(context, found), *suggestions)


def suggest_against(context: Context, finding: str) -> tuple[Suggestion, ...]:
    """Return the suggestions of the rules registered for the id `finding`, the least costly first."""
    candidates = (one for one in _list_candidates(context) if finding in (*one.rule.findings, *one.rule.cures))
    return tuple(suggestion for _, suggestion in _evaluate_first(context, candidates))


def is_cured(context: Context, finding: str) -> bool:
    """Return whether the run does not fit, and would if the tensors that the id `finding` is about were taken away.

    Where memory ended the run, they are its cause only if they are much of it: one more allocation says little.
    """
    run = context.ledger.run
    if run.fits:
        return False
    found = [_evaluate_candidate(context, one) for one in _list_candidates(context) if finding in one.rule.cures]
    least_bytes = MIN_CURED_SHARE * run.required_reserved_bytes if run.trace.ended_out_of_memory else 0
    return any(one is not None and bool(one.fits) and one.num_bytes >= least_bytes for one in found)


def _combine(context: Context, found: Iterable[tuple[_Candidate, Suggestion]]) -> Iterator[Suggestion]:
    """Yield the suggestion to make the first changes of `found` together, as many as it takes for the run to fit.

    Changes that conflict with one before them, that save nothing beside them, or whose effect together with them no
    replay can show, are left out.
    """
    combined = Proposal(context.ledger.trace)
    names, fixes, together = list[str](), list[Fix](), list[tuple[int, Proposal]]()
    for (rule, proposal, *_), alone in found:
        merged = _merge(context.ledger.trace, combined, proposal)
        if merged is None or (rule.fix is not None and any(find_conflict(fix, rule.fix) for fix in fixes)):
            continue
        required = _estimate_required(context, merged)
        if together and required >= together[-1][0]:
            continue
        names.append(alone.fix or proposal.change)
        fixes += [] if rule.fix is None else [FIXES[rule.fix]]
        combined = merged._replace(change=f"{', '.join(names[:-1])} and {names[-1]} together")
        together.append((required, combined))
    for required, proposal in together[1:]:
        is_last = proposal is combined
        if is_last or required <= (_get_resident_bytes(context) or 0):
            suggestion = _evaluate(context, proposal, None)
            if suggestion is not None and (suggestion.fits or is_last):
                yield suggestion
                break


def _merge(original: Trace, first: Proposal, second: Proposal) -> Proposal | None:
    """Return the proposal to make two changes of `original`: each storage has the smaller of its sizes. Returns None
    if both changes move events."""
    moved = [proposal.trace for proposal in (first, second) if proposal.trace.events is not original.events]
    if len(moved) > 1:
        return None
    # A change that moves events may have added storages, behind all others.
    pairs = zip(first.trace.storages, second.trace.storages, strict=False)
    sizes = {i: min(a.num_bytes, b.num_bytes) for i, (a, b) in enumerate(pairs) if a.num_bytes != b.num_bytes}
    return Proposal(resize(moved[0] if moved else original, sizes), config=second.config or first.config)


def list_fix_names(suggestions: tuple[Suggestion, ...]) -> tuple[str, ...]:
    """Return the names of the fixes among `suggestions`, without values."""
    return tuple(one.fix.partition("=")[0] for one in suggestions if one.fix is not None)


@cache_per_context
def _list_candidates(context: Context) -> list[_Candidate]:
    """Return the proposals of all rules that seem to save enough, the least costly first."""
    return [
        candidate
        for _, rule in sorted(PROPOSAL_RULES.items())
        if rule.fix is None or is_applicable(context, FIXES[rule.fix])
        for proposal in rule.propose(context)
        if (candidate := _estimate(context, rule, proposal)) is not None
    ]


def _estimate(context: Context, rule: ProposalRule, proposal: Proposal) -> _Candidate | None:
    """Return the candidate of `proposal`; None if it saves too little, or does not reduce the one tensor that is larger
    than the GPU."""
    usable_bytes, oom = _get_resident_bytes(context), context.ledger.out_of_memory
    if oom is not None and proposal.trace.storages[oom.storage].num_bytes > oom.limit_bytes:
        return None
    if context.ledger.run.refused:  # the run takes no memory for these
        refused = dict.fromkeys(context.ledger.run.refused, 0)
        proposal = proposal._replace(trace=resize(proposal.trace, refused))
    required = _estimate_required(context, proposal)
    fits = usable_bytes is not None and max(required, compute_first_step_bytes(context, proposal.trace)) <= usable_bytes
    return _Candidate(rule, proposal, required, fits) if _is_enough(context, required, fits) else None


def _estimate_required(context: Context, proposal: Proposal) -> int:
    """Return an estimate of what is reserved with `proposal`: expandable segments are taken to waste nothing, and all
    else the share of segments that the run does."""
    peak = compute_allocated_peak(proposal.trace)
    if proposal.config is not None:
        return peak
    return peak * context.ledger.run.required_reserved_bytes // context.ledger.peak_bytes


def _is_enough(context: Context, required_bytes: int, fits: bool | None) -> bool:
    run = context.ledger.run
    saved_bytes = run.required_reserved_bytes - required_bytes
    is_cure = bool(fits and not run.fits and saved_bytes > 0) and not run.trace.ended_out_of_memory
    return is_cure or saved_bytes >= MIN_SHARE * run.required_reserved_bytes


def _evaluate_first(context: Context, candidates: Iterable[_Candidate]) -> list[tuple[_Candidate, Suggestion]]:
    """Return the first MAX_SUGGESTIONS candidates that save enough by a replay, with their suggestions; of changes of
    one line after which the run needs the same, the first."""

    def evaluate() -> Iterator[tuple[_Candidate, Suggestion]]:
        effects = set[tuple[str, int]]()
        for one in candidates:
            found = _evaluate_candidate(context, one)
            effect = None if found is None or found.source is None else (found.source, found.required_bytes)
            if found is not None and effect not in effects:
                effects |= set() if effect is None else {effect}
                yield one, found

    return list(islice(evaluate(), MAX_SUGGESTIONS))


def _evaluate_candidate(context: Context, candidate: _Candidate) -> Suggestion | None:
    """Return what `_evaluate` does for a candidate; several findings may ask for the same."""
    evaluated = _get_evaluated(context)
    if id(candidate) not in evaluated:
        evaluated[id(candidate)] = _evaluate(context, candidate.proposal, _name_fix(candidate))
    return evaluated[id(candidate)]


@cache_per_context
def _get_evaluated(context: Context) -> dict[int, Suggestion | None]:
    """Return the suggestions so far, by the identity of their candidates, which `_list_candidates` keeps."""
    return {}


def _name_fix(candidate: _Candidate) -> str | None:
    """Return the fix that makes a candidate's change, NAME or NAME=VALUE; None if only the program's code can."""
    fix, (_, change, value, *_) = candidate.rule.fix, candidate.proposal
    if value is None:
        return None if change else fix
    return f"{fix}={value}"


def _describe_fix(context: Context, fix: str) -> str:
    """Return a fix, NAME or NAME=VALUE, as the run can take it: by this name, or as a change of the script's code if
    `memprof run --fix` cannot make it."""
    name, _, value = fix.partition("=")
    if context.spec is not None or FIXES[name].script_order is not None:
        return fix
    return FIXES[name].describe_in_code(value)


def _evaluate(context: Context, proposal: Proposal, fix: str | None) -> Suggestion | None:
    """Return the suggestion of a proposal, with its effect by a replay; None if it saves too little.

    The texts have the CUDA context in what a run needs, as its verdict has.
    """
    run, trace = context.ledger.run, proposal.trace
    if run.rounds:
        config = proposal.config or run.config
        if trace is run.trace:
            needs = run.compute_needs(config)
        else:
            needs = compute_memory_needs(trace, run.gpu, config, run.release)
        required, fits = needs.required_reserved_bytes, None if run.gpu is None else needs.fits
        releases_cache = needs.releases_cache
    else:
        releases_cache = False
        required, fits = replay_in_host_memory(trace).required_reserved_bytes, None
    if not _is_enough(context, required, fits):
        return None
    if not run.fits and not fits and required >= run.least_reserved_bytes:
        return None  # the run takes no more where its cache is released in vain
    before, context_bytes = run.least_reserved_bytes, 0 if run.gpu is None else run.gpu.context_bytes
    text = f"{proposal.change or _describe_fix(context, fix or '')}: "
    has_computed = any(phase.kind.computes for _, phase in context.phases)
    if releases_cache:  # it would reserve more than the GPU has
        text += f"{'this allocation ' * trace.ended_out_of_memory}fits, with allocator retries"
    elif trace.ended_out_of_memory and fits and not has_computed:  # what is computed needs more than its data
        text += "this allocation fits"
    else:
        at_least = " at least" * trace.ended_out_of_memory  # what comes after the failed allocation was not run
        text += f"needs{at_least} {format_bytes(required + context_bytes)}"
        text += f" instead of {format_bytes(before + context_bytes)}" * (required < before)
        total_bytes = None if run.gpu is None else run.gpu.usable_bytes + context_bytes
        if fits and total_bytes and format_bytes(required + context_bytes) == format_bytes(total_bytes):
            text += f" ({format_bytes(total_bytes - required - context_bytes)} less than the GPU has)"
    later_bytes = compute_first_step_bytes(context, trace)
    if trace.ended_out_of_memory and fits and run.gpu is not None and later_bytes > run.gpu.usable_bytes:
        text += f", and {format_bytes(later_bytes + context_bytes)} in the first optimizer step, which does not fit"
        fits = False
    elif not run.fits and not fits:
        text += "; still does not fit"
    elif not run.fits and not trace.ended_out_of_memory and not releases_cache:
        text += ", and fits"
    device = trace.facts.device
    if fits and device.unified_bytes is not None and required > (device.resident_bytes or 0):
        text += ", but pages"
        fits = False
    return Suggestion(text, fix, required, fits, run.required_reserved_bytes - required, proposal.source)


def _get_resident_bytes(context: Context) -> int | None:
    """Return the bytes that the allocator can reserve without paging; None: unknown."""
    device = context.ledger.trace.facts.device
    return context.usable_bytes if device.unified_bytes is None else device.resident_bytes
