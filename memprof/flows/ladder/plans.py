"""How a model is to be spread over so many cards, and which remedies it needs besides (`--fix auto --gpus N`).

A plan that fits as it is gives nothing up. Where none does, each has its cheapest set of remedies, and the plan that
then takes least time for a sequence is the answer: what it sends between cards is priced like what a remedy computes
again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from memprof.errors import MemprofError, UsageError
from memprof.flows.ladder.runs import SpecRuns, with_ladder
from memprof.flows.ladder.search import CHEAPER, search
from memprof.flows.profile import profile
from memprof.remedy_catalog import tiers
from memprof.report.documents.report import Document
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.units import format_bytes
from memprof.workload.plan import check_plan, parse_plan

_MOST_CARDS = 256
"""Beyond so many it is not asked whether it fits without remedies."""


def search_plans(spec: TargetSpec, progress: Callable[[str], None] = lambda doing: None) -> tuple[Trace, Document]:
    """The run on `spec.gpus` cards with the cheapest plan and set of remedies that fits, and how it was found.

    Raises:
        UsageError: the model cannot be found.
        RunFailedError: as `profile`.
    """
    found: dict[str, SpecRuns] = {}
    left_out: dict[str, str] = {}
    for plan in plans(spec, spec.gpus):
        found[plan] = SpecRuns(spec.edit(parallel=plan), functools.partial(_say, progress, plan))
        if found[plan].original.fits:
            fits = f"{plan} over {spec.gpus} cards fits as it is: nothing is given up"
            return _with(with_ladder(found[plan], (), fits), left_out)
        left_out[f"--parallel {plan}"] = f"as it is, needs {format_bytes(found[plan].original.needed_bytes)} of a card"
    best: tuple[float, str, tuple[Trace, Document]] | None = None
    for plan, runs in reversed(found.items()):
        shared_by = parse_plan(plan, spec.gpus).sequence
        if best is not None and best[0] <= runs.original.seconds * shared_by:
            continue  # remedies make a step no shorter
        answer = search(runs, tiers()[:1])
        if not answer[1].verdict.fits:
            continue
        seconds = (answer[1].ladder[-1].cost.step_seconds or 0.0) * shared_by
        if best is None or seconds < best[0] * (1 - CHEAPER):
            best = seconds, plan, answer
    plan, answer = best[1:] if best is not None else (plan, search(found[plan]))
    left_out.pop(f"--parallel {plan}")
    more = _without_anything(spec, progress)
    document = answer[1]
    shared_by = parse_plan(plan, spec.gpus).sequence
    shared = f", {shared_by} cards on each sequence" if shared_by > 1 else ""
    reason = f"--parallel {plan}{shared}; {document.ladder_reason}; {more}"
    return _with((answer[0], dataclasses.replace(document, ladder_reason=reason)), left_out)


def plans(spec: TargetSpec, gpus: int) -> list[str]:
    """Those that the model can be spread by, the simplest first: replicas, shards, and shards of sequences."""
    from memprof.workload.models import find_source

    source = find_source(spec)
    powers = [1 << power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0]
    found = []
    for plan in ("ddp", "fsdp", *(f"ulysses={ranks},fsdp" for ranks in powers)):
        asked = spec.edit(parallel=plan, gpus=gpus)
        try:
            check_plan(parse_plan(plan, gpus), asked, source.task, source.config)
        except UsageError:
            continue
        found.append(plan)
    return found


def _without_anything(spec: TargetSpec, progress: Callable[[str], None]) -> str:
    """On how many cards it fits without a remedy; twice as many are tried at a time."""
    gpus = 2 * spec.gpus
    while gpus <= _MOST_CARDS:
        plan = plans(spec, gpus)[-1]
        tried = spec.edit(gpus=gpus, parallel=plan)
        try:
            fits = profile(tried, functools.partial(_say, progress, f"{gpus} cards"), explained=False)[1].verdict.fits
        except MemprofError:
            break
        if fits:
            return f"{gpus} such cards take it as it is (--parallel {plan})"
        gpus *= 2
    return f"no number of cards up to {gpus // 2} takes it as it is"


def _with(answer: tuple[Trace, Document], left_out: dict[str, str]) -> tuple[Trace, Document]:
    trace, document = answer
    return trace, dataclasses.replace(document, ladder_left_out={**left_out, **document.ladder_left_out})


def _say(progress: Callable[[str], None], of: str, doing: str) -> None:
    progress(f"{of}: {doing}")
