"""Parallel plans of a model over N GPUs, and the fixes that each plan needs besides (`--fix auto --gpus N`).

The answer is the first plan that fits without fixes. If no plan does, each plan gets its cheapest set of fixes, and the
answer is the plan with the least time for the same number of sequences: communication between GPUs counts like the
recomputation of a fix.

Plans that cannot fit are not run: a plan divides the peak memory of a replica among GPUs, and does not reduce the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import BESIDE, SPREADS, tiers
from memprof.fixes.catalog.fix import WEIGHTS
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWith, SpecRuns, run_with_ladder
from memprof.flows.ladder.search import CHEAPER, ChosenFixes, find_fixes
from memprof.flows.profile import count_parallel_runs
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.units import format_bytes
from memprof.workload.plan import parse_plan

_MOST_GPUS = 256  # the largest number of GPUs tried without fixes
_OF_SEQUENCES = ("activations", "logits and loss", "inputs")


def search_plans(spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None) -> tuple[Trace, Report]:
    """Return the run on `spec.gpus` GPUs with the cheapest plan and fixes that fit, and a report with the ladder."""
    runs = SpecRuns(spec.edit(parallel=BESIDE), progress)
    found = plans(spec, spec.gpus)
    plan, left_out = _find_fitting(runs, spec.gpus, found)
    if plan is not None:
        fits = f"--parallel {plan} over {spec.gpus} GPUs fits without fixes"
        return _build_answer(runs, found[plan], ChosenFixes((), fits, left_out))
    more = _add_gpus(runs, spec)
    plan, answer = _find_quickest(runs, found, count_parallel_runs(spec), progress)
    left_out.pop(f"--parallel {plan}")
    reason = f"--parallel {plan}; {answer.reason}; {_describe_more_gpus(runs, spec, more)}"
    return _build_answer(runs, found[plan], ChosenFixes(answer.steps, reason, left_out | answer.left_out))


def _find_fitting(runs: Runs, gpus: int, found: Mapping[str, Sequence[ChosenFix]]) -> tuple[str | None, dict[str, str]]:
    """Return the first plan that fits without fixes (None: no plan), and the needs of the plans before."""
    usable = runs.original.document.device.usable_bytes or 0
    least = {plan: _min_bytes(runs, plan, gpus) for plan in found}
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


def _find_quickest(
    runs: Runs, found: Mapping[str, Sequence[ChosenFix]], processes: int, progress: Callable[[str], None]
) -> tuple[str, ChosenFixes]:
    """Return the plan with the quickest step under its cheapest exact fixes, and these fixes. If no plan fits so,
    return the plan that needs least, with any fixes. The most sharded plans run first, `processes` at a time."""
    from memprof.workload.pool import run_all

    best: tuple[float, str, ChosenFixes] | None = None
    added_seconds = 0.0  # that the fixes of the best plan add to a step: plans that need more memory add as much

    def may_be_better(plan: str) -> bool:
        return best is None or runs.with_fixes(found[plan]).seconds + added_seconds <= best[0] * (1 - CHEAPER)

    left = list(found)[::-1]
    while left:
        batch, left = [plan for plan in left[:processes] if may_be_better(plan)], left[processes:]
        tasks = [functools.partial(_find_fixes, runs, found[plan]) for plan in batch]
        for plan, answer in zip(batch, run_all(tasks, progress), strict=True):
            if isinstance(answer, MemprofError):
                raise answer
            if answer.fits and may_be_better(plan) and (best is None or answer.seconds < best[0] * (1 - CHEAPER)):
                best, added_seconds = (answer.seconds, plan, answer.found), answer.seconds - answer.seconds_before
                runs.add_runs(answer.rows)
    if best is not None:
        return best[1:]
    plan = min(found, key=lambda plan: runs.with_fixes(found[plan]).needed_bytes)
    return plan, find_fixes(RunsWith(runs, found[plan]))


@dataclass(frozen=True, slots=True)
class _PlanFixes:
    """The cheapest fixes on top of a plan, the step time without and with these fixes, and the runs of their rows."""

    found: ChosenFixes
    fits: bool
    seconds_before: float
    seconds: float
    rows: Sequence[tuple[Sequence[ChosenFix], LadderRun]]


def _find_fixes(runs: Runs, steps: Sequence[ChosenFix]) -> _PlanFixes:
    """Return the cheapest exact fixes on top of the plan `steps`; may run in a worker process."""
    with_plan = RunsWith(runs, steps)
    found = find_fixes(with_plan, tiers()[:1])
    rows = [([*steps, *fixes], with_plan.with_fixes(fixes)) for fixes in found.steps]
    last = rows[-1][1] if rows else with_plan.original
    return _PlanFixes(found, last.fits, with_plan.original.seconds, last.seconds, rows)


def _min_bytes(runs: Runs, plan: str, gpus: int) -> int:
    """Return a lower bound in bytes of a GPU's peak under `plan`: weights, gradients and optimizer state divided among
    shards, and a sequence's tensors among the GPUs that share the sequence. DDP's buckets are not counted."""
    spread = parse_plan(plan, gpus)
    target, peak = runs.original.document.target, runs.original.document.peak
    if target is None or target.asked.amp is not None:
        return 0  # fully_shard's own mixed precision keeps other tensors than autocast does
    weights, sequence = (sum(peak.categories.get(one, 0) for one in of) for of in (WEIGHTS, _OF_SEQUENCES))
    return weights // (spread.size if spread.sharded else 1) + sequence // spread.sharing


def plans(spec: TargetSpec, gpus: int) -> dict[str, list[ChosenFix]]:
    """Return the parallel plans that apply to the model, the simplest first, each with the fixes that lead there."""
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


def _build_answer(runs: Runs, spread: Sequence[ChosenFix], found: ChosenFixes) -> tuple[Trace, Report]:
    """Return the run with the fixes `found`, with a ladder row for each step of the plan `spread`, then each fix."""
    steps = [list(spread[:count]) for count in range(1, len(spread) + 1)]
    all_steps = [*steps, *([*spread, *fixes] for fixes in found.steps)]
    return run_with_ladder(runs, all_steps, found.reason, found.left_out)


def _add_gpus(runs: Runs, spec: TargetSpec, gpus: int = 0) -> TargetSpec | None:
    """Return `spec` on the first doubling of `gpus` that may fit without fixes; None if no number of GPUs may."""
    gpus = 2 * (gpus or spec.gpus)
    while gpus <= _MOST_GPUS:
        plan = [*plans(spec, gpus)][-1]
        if _min_bytes(runs, plan, gpus) <= (runs.original.document.device.usable_bytes or 0):
            return spec.edit(gpus=gpus, parallel=plan)
        gpus *= 2
    return None


def _describe_more_gpus(runs: SpecRuns, spec: TargetSpec, more: TargetSpec | None) -> str:
    """Return a sentence: the number of GPUs on which the run fits without fixes."""
    while more is not None:
        try:
            fits = runs.profile(more, f"{more.gpus} GPUs")[1].verdict.fits
        except MemprofError:
            break
        if fits:
            return f"{more.gpus} such GPUs run it without fixes (--parallel {more.parallel})"
        more = _add_gpus(runs, spec, more.gpus)
    return f"no number of GPUs up to {_MOST_GPUS if more is None else more.gpus // 2} runs it without fixes"
