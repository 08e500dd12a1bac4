"""Parallel plans of a model over N GPUs, and the fixes that each plan needs besides (`--fix auto --gpus N`).

The result is the first plan that fits without fixes. If no plan does, each plan gets its cheapest set of fixes, and the
result is the plan with the least time for the same number of sequences: communication between GPUs counts like the
recomputation of a fix.

Plans that cannot fit are not run: a plan divides the peak memory of a replica among GPUs, and does not reduce the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import BASE_PLAN, PARALLEL_FIXES, list_tiers
from memprof.fixes.catalog.fix import WEIGHTS
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.flows.ladder.runs import LadderRun, Runs, RunsWithFixes, SpecRuns, run_with_ladder
from memprof.flows.ladder.search import MIN_SPEEDUP, ChosenFixes, find_cheapest_fixes
from memprof.flows.profile import count_parallel_runs
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.units import format_bytes
from memprof.workload.plan import parse_plan

_MAX_GPUS = 256  # the largest number of GPUs tried without fixes
_SEQUENCE_CATEGORIES = ("activations", "logits and loss", "inputs")


def search_plans(spec: TargetSpec, progress: Callable[[str], None] = lambda _: None) -> tuple[Trace, Report]:
    """Return trace and report of the run with the cheapest parallel plan and fixes that fit `spec.gpus` GPUs."""
    runs = SpecRuns(spec.edit(parallel=BASE_PLAN), progress)
    steps_by_plan = list_plans(spec, spec.gpus)
    plan, rejections = _find_fitting_plan(runs, spec.gpus, steps_by_plan)
    if plan is not None:
        fits_reason = f"--parallel {plan} over {spec.gpus} GPUs fits without fixes"
        return _build_report(runs, steps_by_plan[plan], ChosenFixes((), fits_reason, rejections))
    larger_spec = _find_larger_spec(runs, spec)
    plan, fixes = _find_quickest_plan(runs, steps_by_plan, count_parallel_runs(spec), progress)
    rejections.pop(f"--parallel {plan}")
    reason = f"--parallel {plan}; {fixes.reason}; {_describe_more_gpus(runs, spec, larger_spec)}"
    return _build_report(runs, steps_by_plan[plan], ChosenFixes(fixes.steps, reason, rejections | fixes.rejected_fixes))


def _find_fitting_plan(
    runs: Runs, gpus: int, steps_by_plan: Mapping[str, Sequence[ChosenFix]]
) -> tuple[str | None, dict[str, str]]:
    """Return the first plan that fits without fixes (None: no plan), and a note on the memory of each earlier plan."""
    usable_bytes = runs.original.document.device.usable_bytes or 0
    min_bytes = {plan: _bound_plan_bytes(runs, plan, gpus) for plan in steps_by_plan}
    rejections: dict[str, str] = {}
    for plan, steps in steps_by_plan.items():
        if steps and min_bytes[plan] > usable_bytes:
            need = f"at least {format_bytes(min_bytes[plan])}"
        else:
            run = runs.run_with_fixes(steps)
            if run.fits:
                return plan, rejections
            need = format_bytes(run.needed_bytes)
        rejections[f"--parallel {plan}"] = f"without fixes it needs {need} of a GPU"
    return None, rejections


def _find_quickest_plan(
    runs: Runs, steps_by_plan: Mapping[str, Sequence[ChosenFix]], num_processes: int, progress: Callable[[str], None]
) -> tuple[str, ChosenFixes]:
    """Return the plan with the quickest step under its cheapest exact fixes, and these fixes. If no plan fits with
    exact fixes, return the plan with the least memory, and its cheapest fixes of any kind."""
    from memprof.workload.pool import run_all_or_raise

    best: tuple[float, str, ChosenFixes] | None = None
    added_seconds = 0.0  # that the fixes of the best plan add to a step: plans that need more memory add as much

    def may_be_better(plan: str) -> bool:
        return best is None or runs.run_with_fixes(steps_by_plan[plan]).seconds + added_seconds <= best[0] * (
            1 - MIN_SPEEDUP
        )

    queue = list(steps_by_plan)[::-1]
    while queue:
        plans, queue = [plan for plan in queue[:num_processes] if may_be_better(plan)], queue[num_processes:]
        tasks = [functools.partial(_find_plan_fixes, runs, steps_by_plan[plan]) for plan in plans]
        results = run_all_or_raise(tasks, lambda done: progress(f"fixes of plans: {done}"))
        for plan, result in zip(plans, results, strict=True):
            if result.fits and may_be_better(plan) and (best is None or result.seconds < best[0] * (1 - MIN_SPEEDUP)):
                best, added_seconds = (result.seconds, plan, result.fixes), result.seconds - result.plan_seconds
                runs.add_runs(result.rows)
    if best is not None:
        return best[1:]
    plan = min(steps_by_plan, key=lambda plan: runs.run_with_fixes(steps_by_plan[plan]).needed_bytes)
    return plan, find_cheapest_fixes(RunsWithFixes(runs, steps_by_plan[plan]))


@dataclass(frozen=True, slots=True)
class _PlanFixes:
    """The cheapest fixes on top of a parallel plan, and the step time in seconds without and with these fixes."""

    fixes: ChosenFixes
    fits: bool
    plan_seconds: float
    seconds: float
    rows: Sequence[tuple[Sequence[ChosenFix], LadderRun]]


def _find_plan_fixes(runs: Runs, steps: Sequence[ChosenFix]) -> _PlanFixes:
    """Return the cheapest exact fixes on top of the plan `steps`; may run in a worker process."""
    plan_runs = RunsWithFixes(runs, steps)
    chosen = find_cheapest_fixes(plan_runs, list_tiers()[:1])
    rows = [([*steps, *fixes], plan_runs.run_with_fixes(fixes)) for fixes in chosen.steps]
    last_run = rows[-1][1] if rows else plan_runs.original
    return _PlanFixes(chosen, last_run.fits, plan_runs.original.seconds, last_run.seconds, rows)


def _bound_plan_bytes(runs: Runs, plan: str, gpus: int) -> int:
    """Return a lower bound in bytes of a GPU's peak under `plan`: weights, gradients and optimizer state divided among
    shards, and a sequence's tensors among the GPUs that share the sequence. DDP's buckets are not counted."""
    layout = parse_plan(plan, gpus)
    target, peak = runs.original.document.target, runs.original.document.peak
    if target is None or target.asked.amp is not None:
        return 0  # fully_shard's own mixed precision keeps other tensors than autocast does
    weight_bytes, sequence = (sum(peak.categories.get(one, 0) for one in of) for of in (WEIGHTS, _SEQUENCE_CATEGORIES))
    return weight_bytes // (layout.size if layout.sharded else 1) + sequence // layout.sharing


def list_plans(spec: TargetSpec, gpus: int) -> dict[str, list[ChosenFix]]:
    """Return the parallel plans (`--parallel`) that apply to the model, simplest first, with the fixes of each."""
    fsdp, ulysses = PARALLEL_FIXES["fsdp"], PARALLEL_FIXES["ulysses"]
    powers = [1 << power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0]
    plans: dict[str, list[ChosenFix]] = {}
    for steps in ([], [ChosenFix(fsdp)], *([ChosenFix(fsdp), ChosenFix(ulysses, str(ranks))] for ranks in powers)):
        plan_spec = spec.edit(parallel=BASE_PLAN, gpus=gpus)
        try:
            for fix in steps:
                plan_spec = edit_spec(plan_spec, fix, {})
        except UsageError:
            continue
        plans[plan_spec.parallel or BASE_PLAN] = steps
    return plans


def _build_report(runs: Runs, plan_steps: Sequence[ChosenFix], fixes: ChosenFixes) -> tuple[Trace, Report]:
    """Return trace and report with `fixes` on top of a plan; the ladder has a row for each step of the plan and fix."""
    steps = [list(plan_steps[:count]) for count in range(1, len(plan_steps) + 1)]
    all_steps = [*steps, *([*plan_steps, *fixes] for fixes in fixes.steps)]
    return run_with_ladder(runs, all_steps, fixes.reason, fixes.rejected_fixes)


def _find_larger_spec(runs: Runs, spec: TargetSpec, gpus: int = 0) -> TargetSpec | None:
    """Return `spec` with the number of GPUs doubled until it may fit without fixes; None if no number of GPUs may."""
    gpus = 2 * (gpus or spec.gpus)
    while gpus <= _MAX_GPUS:
        plan = [*list_plans(spec, gpus)][-1]
        if _bound_plan_bytes(runs, plan, gpus) <= (runs.original.document.device.usable_bytes or 0):
            return spec.edit(gpus=gpus, parallel=plan)
        gpus *= 2
    return None


def _describe_more_gpus(runs: SpecRuns, spec: TargetSpec, larger_spec: TargetSpec | None) -> str:
    """Return a sentence on the number of GPUs that run the model without fixes; tries `larger_spec` and doublings."""
    while larger_spec is not None:
        try:
            fits = runs.profile(larger_spec, f"{larger_spec.gpus} GPUs")[1].verdict.fits
        except MemprofError:
            break
        if fits:
            return f"{larger_spec.gpus} such GPUs run it without fixes (--parallel {larger_spec.parallel})"
        larger_spec = _find_larger_spec(runs, spec, larger_spec.gpus)
    return (
        f"no number of GPUs up to {_MAX_GPUS if larger_spec is None else larger_spec.gpus // 2} runs it without fixes"
    )
