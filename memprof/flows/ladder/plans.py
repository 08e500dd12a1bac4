"""Ways to spread a model over so many GPUs, and the fixes each needs besides (`--fix auto --gpus N`).

A plan that fits as it is gives nothing up. Where none does, each has its cheapest set of fixes, and the plan that
then takes least time for as many sequences is the answer: what it sends between GPUs is priced like what a fix
computes again.

A plan is not run where it cannot fit: GPUs that share what a replica holds at its peak hold all of it together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import BESIDE, SPREADS, tiers
from memprof.fixes.catalog.fix import WEIGHTS
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWith, SpecRuns, with_ladder
from memprof.flows.ladder.search import CHEAPER, ChosenFixes, find
from memprof.flows.profile import at_once
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.units import format_bytes
from memprof.workload.plan import parse_plan

_MOST_GPUS = 256  # beyond so many it is not asked whether it fits without fixes
_OF_SEQUENCES = ("activations", "logits and loss", "inputs")


def search_plans(spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None) -> tuple[Trace, Report]:
    """Return the run on `spec.gpus` GPUs with the cheapest plan and set of fixes that fits, and how it was found."""
    runs = SpecRuns(spec.edit(parallel=BESIDE), progress)
    found = plans(spec, spec.gpus)
    plan, left_out = _first_fit(runs, spec.gpus, found)
    if plan is not None:
        fits = f"--parallel {plan} over {spec.gpus} GPUs fits without fixes"
        return _answer_with_rows(runs, found[plan], ChosenFixes((), fits, left_out))
    more = _more_gpus(runs, spec)
    plan, answer = _quickest_with_fixes(runs, found, at_once(spec), progress)
    left_out.pop(f"--parallel {plan}")
    reason = f"--parallel {plan}; {answer.reason}; {_gpus_without_fixes(runs, spec, more)}"
    return _answer_with_rows(runs, found[plan], ChosenFixes(answer.steps, reason, left_out | answer.left_out))


def _first_fit(runs: Runs, gpus: int, found: Mapping[str, Sequence[ChosenFix]]) -> tuple[str | None, dict[str, str]]:
    """Return the first plan that fits as it is, if one does, and what those before it need."""
    usable = runs.original.document.device.usable_bytes or 0
    least = {plan: _least(runs, plan, gpus) for plan in found}
    left_out: dict[str, str] = {}
    for plan, steps in found.items():
        if steps and least[plan] > usable:
            needs = f"at least {format_bytes(least[plan])}"
        else:
            run = runs.with_fixes(steps)
            if run.fits:
                return plan, left_out
            needs = format_bytes(run.needed_bytes)
        left_out[f"--parallel {plan}"] = f"without fixes it needs {needs} of a GPU"
    return None, left_out


def _quickest_with_fixes(
    runs: Runs, found: Mapping[str, Sequence[ChosenFix]], processes: int, progress: Callable[[str], None]
) -> tuple[str, ChosenFixes]:
    """Find the plan whose cheapest exact fixes make the quickest step; if nothing fits so, what is found for the one
    that needs least. Those that share most are asked first, `processes` of them at a time."""
    from memprof.workload.pool import run_all

    best: tuple[float, str, ChosenFixes] | None = None
    dearer = 0.0  # what the fixes of the best add to its step: what needs more than it needs fixes that add as much

    def may_be_better(plan: str) -> bool:
        return best is None or runs.with_fixes(found[plan]).seconds + dearer <= best[0] * (1 - CHEAPER)

    left = list(found)[::-1]
    while left:
        asked, left = [plan for plan in left[:processes] if may_be_better(plan)], left[processes:]
        works = [functools.partial(_cheapest, runs, found[plan]) for plan in asked]
        for plan, answer in zip(asked, run_all(works, progress), strict=True):
            if isinstance(answer, MemprofError):
                raise answer
            if answer.fits and may_be_better(plan) and (best is None or answer.seconds < best[0] * (1 - CHEAPER)):
                best, dearer = (answer.seconds, plan, answer.found), answer.seconds - answer.seconds_before
                runs.know(answer.rows)
    if best is not None:
        return best[1:]
    plan = min(found, key=lambda plan: runs.with_fixes(found[plan]).needed_bytes)
    return plan, find(RunsWith(runs, found[plan]))


@dataclass(frozen=True, slots=True)
class _Cheapest:
    """The cheapest fixes beside a plan, the time of a step without them and with them, and the runs of its rows."""

    found: ChosenFixes
    fits: bool
    seconds_before: float
    seconds: float
    rows: Sequence[tuple[Sequence[ChosenFix], LadderRun]]


def _cheapest(runs: Runs, steps: Sequence[ChosenFix]) -> _Cheapest:
    """Find the fixes beside a plan, be it in a process of its own."""
    beside = RunsWith(runs, steps)
    found = find(beside, tiers()[:1])
    rows = [([*steps, *fixes], beside.with_fixes(fixes)) for fixes in found.steps]
    last = rows[-1][1] if rows else beside.original
    return _Cheapest(found, last.fits, beside.original.seconds, last.seconds, rows)


def _least(runs: Runs, plan: str, gpus: int) -> int:
    """Return what a GPU needs for its part of what a replica holds at its peak: of weights, their gradients and states
    if they are sharded, and of a sequence's tensors if it is shared. What DDP alone has is not in it."""
    spread = parse_plan(plan, gpus)
    target, peak = runs.original.document.target, runs.original.document.peak
    if target is None or target.asked.amp is not None:
        return 0  # fully_shard's own mixed precision keeps other tensors than autocast does
    weights, sequence = (sum(peak.categories.get(one, 0) for one in of) for of in (WEIGHTS, _OF_SEQUENCES))
    return weights // (spread.size if spread.sharded else 1) + sequence // spread.sharing


def plans(spec: TargetSpec, gpus: int) -> dict[str, list[ChosenFix]]:
    """Return the plans that the model can be spread by, the simplest first, each with the steps that lead there."""
    fsdp, ulysses = SPREADS["fsdp"], SPREADS["ulysses"]
    powers = [1 << power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0]
    found: dict[str, list[ChosenFix]] = {}
    for steps in ([], [ChosenFix(fsdp)], *([ChosenFix(fsdp), ChosenFix(ulysses, str(ranks))] for ranks in powers)):
        spread = spec.edit(parallel=BESIDE, gpus=gpus)
        try:
            for fix in steps:
                spread = edit_spec(spread, fix, {})
        except UsageError:
            continue
        found[spread.parallel or BESIDE] = steps
    return found


def _answer_with_rows(runs: Runs, spread: Sequence[ChosenFix], found: ChosenFixes) -> tuple[Trace, Report]:
    """Return the answer, with a row for each step that spreads the run, and then for each fix."""
    steps = [list(spread[:count]) for count in range(1, len(spread) + 1)]
    all_steps = [*steps, *([*spread, *fixes] for fixes in found.steps)]
    return with_ladder(runs, all_steps, found.reason, found.left_out)


def _more_gpus(runs: Runs, spec: TargetSpec, gpus: int = 0) -> TargetSpec | None:
    """Return the run on more than `gpus`, on as many as could take it without a fix, by doubling; None: none could."""
    gpus = 2 * (gpus or spec.gpus)
    while gpus <= _MOST_GPUS:
        plan = [*plans(spec, gpus)][-1]
        if _least(runs, plan, gpus) <= (runs.original.document.device.usable_bytes or 0):
            return spec.edit(gpus=gpus, parallel=plan)
        gpus *= 2
    return None


def _gpus_without_fixes(runs: SpecRuns, spec: TargetSpec, more: TargetSpec | None) -> str:
    """Say on how many GPUs it fits without a fix."""
    while more is not None:
        try:
            fits = runs.profile(more, f"{more.gpus} GPUs")[1].verdict.fits
        except MemprofError:
            break
        if fits:
            return f"{more.gpus} such GPUs run it without fixes (--parallel {more.parallel})"
        more = _more_gpus(runs, spec, more.gpus)
    return f"no number of GPUs up to {_MOST_GPUS if more is None else more.gpus // 2} runs it without fixes"
