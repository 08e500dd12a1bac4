"""How a model is to be spread over so many cards, and which remedies it needs besides (`--fix auto --gpus N`).

A plan that fits as it is gives nothing up. Where none does, each has its cheapest set of remedies, and the plan that
then takes least time for as many sequences is the answer: what it sends between cards is priced like what a remedy
computes again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from memprof.errors import MemprofError, UsageError
from memprof.flows.account import analyze
from memprof.flows.ladder.runs import Runs, RunsWith, SpecRuns, with_ladder
from memprof.flows.ladder.search import CHEAPER, Found, find
from memprof.flows.profile import profile
from memprof.remedies.fixes import Fix, edit_spec
from memprof.remedy_catalog import BESIDE, SPREADS, tiers
from memprof.report.documents.report import Document
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.units import format_bytes

_MOST_CARDS = 256
"""Beyond so many it is not asked whether it fits without remedies."""


def search_plans(spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None) -> tuple[Trace, Document]:
    """The run on `spec.gpus` cards with the cheapest plan and set of remedies that fits, and how it was found.

    Raises:
        UsageError: the model cannot be found.
        RunFailedError: as `profile`.
    """
    runs = SpecRuns(spec.edit(parallel=BESIDE), progress)
    runs.explains = runs.original.is_stopped  # else a finding stops none of them
    found: dict[str, list[Fix]] = {}
    left_out: dict[str, str] = {}
    for plan, steps in plans(spec, spec.gpus).items():
        run = runs.with_fixes(steps) if steps else runs.original
        if run.fits:
            fits = f"--parallel {plan} over {spec.gpus} cards fits as it is: nothing is given up"
            return _climbed(runs, steps, Found((), fits, left_out))
        found[plan] = steps
        left_out[f"--parallel {plan}"] = f"as it is, needs {format_bytes(run.needed_bytes)} of a card"
    best: tuple[float, str, Found] | None = None
    dearer = 0.0
    """What the remedies of the best add to its step: what needs more than it needs remedies that add as much."""
    for plan, steps in reversed(found.items()):
        beside = RunsWith(runs, steps)
        if best is not None and beside.original.seconds + dearer > best[0] * (1 - CHEAPER):
            continue
        answer = find(beside, tiers()[:1])
        last = beside.with_fixes(answer.steps[-1]) if answer.steps else beside.original
        if last.fits and (best is None or last.seconds < best[0] * (1 - CHEAPER)):
            best, dearer = (last.seconds, plan, answer), last.seconds - beside.original.seconds
    plan, answer = best[1:] if best is not None else (plan, find(RunsWith(runs, found[plan])))
    left_out.pop(f"--parallel {plan}")
    reason = f"--parallel {plan}; {answer.reason}; {_without_anything(spec, progress)}"
    return _climbed(runs, found[plan], Found(answer.steps, reason, left_out | answer.left_out))


def plans(spec: TargetSpec, gpus: int) -> dict[str, list[Fix]]:
    """Those that the model can be spread by, the simplest first: replicas, shards, and shards of sequences; each with
    the steps that lead there."""
    fsdp, ulysses = SPREADS["fsdp"], SPREADS["ulysses"]
    powers = [1 << power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0]
    found: dict[str, list[Fix]] = {}
    for steps in ([], [Fix(fsdp)], *([Fix(fsdp), Fix(ulysses, str(ranks))] for ranks in powers)):
        spread = spec.edit(parallel=BESIDE, gpus=gpus)
        try:
            for fix in steps:
                spread = edit_spec(spread, fix, {})
        except UsageError:
            continue
        found[spread.parallel or BESIDE] = steps
    return found


def _climbed(runs: Runs, spread: Sequence[Fix], found: Found) -> tuple[Trace, Document]:
    """The answer, with a row for each step that spreads the run, and then for each remedy."""
    steps = [list(spread[:count]) for count in range(1, len(spread) + 1)]
    all_steps = [*steps, *([*spread, *fixes] for fixes in found.steps)]
    trace, document = with_ladder(runs, all_steps, found.reason, found.left_out)
    rungs = {name: getattr(document, name) for name in ("ladder", "ladder_reason", "ladder_left_out")}
    return trace, dataclasses.replace(analyze(trace), **rungs)


def _without_anything(spec: TargetSpec, progress: Callable[[str], None]) -> str:
    """On how many cards it fits without a remedy; twice as many are tried at a time."""
    gpus = 2 * spec.gpus
    while gpus <= _MOST_CARDS:
        plan = [*plans(spec, gpus)][-1]
        tried = spec.edit(gpus=gpus, parallel=plan)
        try:
            fits = profile(tried, functools.partial(_say, progress, f"{gpus} cards"), explained=False)[1].verdict.fits
        except MemprofError:
            break
        if fits:
            return f"{gpus} such cards take it as it is (--parallel {plan})"
        gpus *= 2
    return f"no number of cards up to {gpus // 2} takes it as it is"


def _say(progress: Callable[[str], None], of: str, doing: str) -> None:
    progress(f"{of}: {doing}")
