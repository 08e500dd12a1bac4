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
from memprof.fixes.catalog import FIXES
from memprof.ledger.what_if import compute_allocated_peak, resize
from memprof.trace.events import Trace
from memprof.units import format_bytes

MAX_SUGGESTIONS = 3
MIN_SHARE = 0.05  # of the run's need: a change that saves less, and does not make the run fit, is not suggested


class Proposal(NamedTuple):
    """A change of the program, and the trace that the run would have left with this change."""

    trace: Trace
    change: str = ""  # what to change in the program's own code; "": the rule's fix makes the change
    value: int | None = None  # of the fix's main option
    config: AllocatorConfig | None = None  # settings of the allocator; None: those of the run


_Propose = Callable[[Context], Iterator[Proposal]]


class ProposalRule(NamedTuple):
    """A rule for proposals; `proposes` explains the fields."""

    order: int
    fix: str | None
    findings: tuple[str, ...]
    propose: _Propose


PROPOSAL_RULES: dict[int, ProposalRule] = {}  # order -> rule


def proposes(order: int, *, fix: str | None = None, findings: tuple[str, ...] = ()) -> Callable[[_Propose], _Propose]:
    """Return a decorator that registers a rule for proposals. Raises ValueError if another rule has the same `order`.

    Args:
        order: sorts rules by the cost of their changes, least first.
        fix: the fix that makes the change; the rule is asked only if the run could apply it.
        findings: ids of the findings that show these suggestions too.
    """

    def register(propose: _Propose) -> _Propose:
        if order in PROPOSAL_RULES:
            raise ValueError(f"{PROPOSAL_RULES[order].propose.__module__} has place {order}: {propose.__module__}")
        PROPOSAL_RULES[order] = ProposalRule(order, fix, findings, propose)
        return propose

    return register


class _Candidate(NamedTuple):
    """A proposal with an estimate of its effect, which costs less than a replay."""

    rule: ProposalRule
    proposal: Proposal
    required_bytes: int
    fits: bool


def suggest(context: Context) -> tuple[Suggestion, ...]:
    """Return the best suggestions: those with which the run fits, the least costly first, then the most bytes."""

    def rank(rule: ProposalRule, fits: bool | None, required_bytes: int) -> tuple[int, int]:
        return (0, rule.order) if fits else (1, required_bytes)

    candidates = sorted(_list_candidates(context), key=lambda one: rank(one.rule, one.fits, one.required_bytes))
    found = _evaluate_first(context, candidates)
    found.sort(key=lambda pair: rank(pair[0], pair[1].fits, pair[1].required_bytes))
    return tuple(suggestion for _, suggestion in found)


def suggest_against(context: Context, finding: str) -> tuple[Suggestion, ...]:
    """Return the suggestions of the rules registered for the id `finding`, the least costly first."""
    found = _evaluate_first(context, (one for one in _list_candidates(context) if finding in one.rule.findings))
    return tuple(suggestion for _, suggestion in found)


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
    than the GPU. Expandable segments are taken to waste nothing, and all else the share of segments that the run does.
    """
    ledger, usable_bytes = context.ledger, context.usable_bytes
    run, oom = ledger.run, ledger.out_of_memory
    if oom is not None and proposal.trace.storages[oom.storage].num_bytes > oom.limit_bytes:
        return None
    if run.refused:  # the run takes no memory for these
        proposal = proposal._replace(trace=resize(proposal.trace, dict.fromkeys(run.refused, 0)))
    required = compute_allocated_peak(proposal.trace)
    if proposal.config is None:
        required = required * run.required_reserved_bytes // ledger.peak_bytes
    fits = usable_bytes is not None and required <= usable_bytes
    return _Candidate(rule, proposal, required, fits) if _is_enough(context, required, fits) else None


def _is_enough(context: Context, required_bytes: int, fits: bool | None) -> bool:
    run = context.ledger.run
    saved_bytes = run.required_reserved_bytes - required_bytes
    return saved_bytes >= MIN_SHARE * run.required_reserved_bytes or bool(fits and not run.fits and saved_bytes > 0)


def _evaluate_first(context: Context, candidates: Iterable[_Candidate]) -> list[tuple[ProposalRule, Suggestion]]:
    """Return the rules and suggestions of the first MAX_SUGGESTIONS candidates that save enough by a replay."""
    pairs = ((candidate.rule, _evaluate(context, candidate)) for candidate in candidates)
    return list(islice(((rule, one) for rule, one in pairs if one is not None), MAX_SUGGESTIONS))


def _evaluate(context: Context, candidate: _Candidate) -> Suggestion | None:
    """Return the suggestion of a candidate, with its effect by a replay; None if it saves too little."""
    run, (rule, proposal) = context.ledger.run, candidate[:2]
    trace = proposal.trace
    if run.rounds:
        needs = compute_memory_needs(trace, run.gpu, proposal.config or run.config, run.release)
        required, fits = needs.required_reserved_bytes, None if run.gpu is None else needs.fits
    else:
        required, fits = replay_in_host_memory(trace).required_reserved_bytes, None
    if not _is_enough(context, required, fits):
        return None
    before = run.required_reserved_bytes
    fix = rule.fix if proposal.value is None else f"{rule.fix}={proposal.value}"
    text = f"{proposal.change or fix}: needs {format_bytes(required)} instead of {format_bytes(before)}"
    if trace.ended_out_of_memory:
        text += " until this allocation, which " + ("is then served" if fits else "still fails")
    elif not run.fits:
        text += ", and " + ("fits" if fits else "does not fit yet")
    return Suggestion(text, None if proposal.change else fix, required, fits, before - required)
