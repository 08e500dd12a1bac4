"""The recommendation for a model, a goal and a GPU: the configuration, its limits and code to paste."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from memprof.command_line import profile_command
from memprof.errors import MemprofError
from memprof.flows.gpus import device_facts, find_gpu_of
from memprof.flows.recommend import snippet
from memprof.flows.recommend.alternatives import alternatives
from memprof.flows.recommend.plans import Goal
from memprof.flows.recommend.search import GRAIN, TIE, Question, Search, SearchResult, Tried
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import Configuration, Recommendation
from memprof.spec import TargetSpec
from memprof.trace.facts import Target
from memprof.units import format_bytes


def recommend(
    spec: TargetSpec, question: Question, progress: Callable[[str], None]
) -> tuple[Recommendation, Search, SearchResult]:
    """Return the recommendation for the model, context length and GPU of `spec`, the search, and its result."""
    runs = Simulator(find_gpu_of(spec), progress)
    goal = question.goal
    search = Search(runs, spec, question)
    if goal is Goal.INFER and search.try_plan(search.tiers[0], question.batch) is None:
        # The model does not decode: only its forward is run.
        runs.failures.clear()
        search.base = search.base.edit(new_tokens=None)
    found = search.search()
    if not found.tried:
        if runs.refusal is not None and set(runs.failures.values()) == {runs.refusal.line}:  # concerns every goal
            raise runs.refusal
        label, why = next(iter(runs.failures.items()))
        raise MemprofError(f"the goal {goal.value} cannot be run with this model", value=f"{label}: {why}")
    chosen = None if found.chosen is None else search.confirm(found.chosen)
    if chosen is not None and not chosen.outcome.fits:
        # Happens if only zeroed gradients made the run fit: leaner configurations are confirmed in turn.
        leaner = sorted((one for one in found.tried if one.outcome.fits), key=lambda one: one.outcome.needed_bytes)
        chosen = next((one for one in map(search.confirm, leaner) if one.outcome.fits), None)
    example = chosen or found.least
    assert example is not None
    target = example.outcome.target
    fields: dict[str, Any] = {}
    if chosen is not None:
        limits = [functools.partial(search.batch_limit, chosen)]
        if target.vocab_size is not None:
            limits.append(functools.partial(search.context_limit, chosen, target.max_positions))
        fields = dict(zip(("batch", "context"), runs.run_searches(limits), strict=False))
        fields["snippets"] = snippet.snippets(chosen.plan, chosen.outcome.spec, chosen.accumulation)
    else:
        fields["alternatives"] = alternatives(search, example)
    answer = build_answer(
        runs,
        spec.host_memory_bytes,
        target,
        _build_rows(runs, found.tried, chosen),
        fits=chosen is not None,
        goal=goal.value,
        effective_batch=question.batch,
        reason=_explain_choice(chosen, found, search),
        assumptions=_assumptions(question, spec),
        **fields,
    )
    return answer, search, dataclasses.replace(found, chosen=chosen)


def build_answer(
    runs: Simulator,
    host_bytes: int | None,
    target: Target,
    rows: tuple[Configuration, ...],
    *,
    fits: bool,
    **fields: Any,
) -> Recommendation:
    """Return the recommendation with the configurations `rows`; the first row is the chosen one if `fits`."""
    return Recommendation(
        device=device_facts(runs.gpu, host_bytes),
        model=target.model,
        num_parameters=target.num_parameters,
        context_length=target.context_length or 0,
        chosen=rows[0] if fits else None,
        choices=rows,
        max_positions=target.max_positions,
        runs=len(runs),
        not_applied=dict(runs.failures),
        gpu_note=runs.gpu.note,
        **fields,
    )


def _build_rows(runs: Simulator, tried: tuple[Tried, ...], chosen: Tried | None) -> tuple[Configuration, ...]:
    """Return the rows of all runs of a search, the chosen one first, then by time of a step."""
    rest = [one for one in tried if chosen is None or (one.plan, one.micro_batch) != (chosen.plan, chosen.micro_batch)]
    rest.sort(key=lambda one: (not one.outcome.fits, one.outcome.seconds, one.outcome.needed_bytes))
    return rows_of(runs, [("", one) for one in ([] if chosen is None else [chosen]) + rest])


def rows_of(runs: Simulator, tried: Sequence[tuple[str, Tried]]) -> tuple[Configuration, ...]:
    """Return the rows of `tried`, in the same order: pairs of a name of `--parallel` ("": one GPU) and a run."""
    points = [(one.outcome.needed_bytes, one.outcome.seconds) for _, one in tried]
    return tuple(
        _row(runs, parallel, one, pareto=_is_on_front(point, points))
        for (parallel, one), point in zip(tried, points, strict=True)
    )


def _is_on_front(point: tuple[int, float], points: list[tuple[int, float]]) -> bool:
    """Return whether no other point has less memory and less time (the Pareto front)."""
    return not any(
        other != point and other[0] <= point[0] and other[1] <= point[1] * (1 - TIE if other[0] == point[0] else 1)
        for other in points
    )


def _row(runs: Simulator, parallel: str, tried: Tried, *, pareto: bool) -> Configuration:
    plan, outcome, step = tried.plan, tried.outcome, tried.outcome.step
    settings = {
        "precision": plan.precision if plan.precision not in ("half", "amp") else f"{plan.precision} ({plan.half})",
        "optimizer": plan.optimizer,
        "activations": plan.activations.value,
        "chunked_loss": plan.chunked_loss,
        "attention": outcome.spec.attention,
        "alloc_conf": outcome.spec.alloc_conf,
    }
    return Configuration(
        name=f"{parallel}: {plan.label()}" if parallel else plan.label(),
        settings=settings,
        command=profile_command(outcome.spec),
        micro_batch=tried.micro_batch,
        accumulation=tried.accumulation,
        needed_bytes=outcome.needed_bytes,
        host_bytes=outcome.host_bytes,
        headroom_bytes=runs.gpu.total_bytes - outcome.needed_bytes,
        fits=outcome.fits,
        step_seconds=None if step is None else step.seconds,
        compute_seconds=None if step is None else step.compute_seconds,
        bus_seconds=None if step is None else step.bus_seconds,
        link_seconds=None if step is None else step.link_seconds,
        given_up=plan.given_up,
        pareto=pareto,
        oom_stage=outcome.oom_stage,
        parallel=parallel or None,
    )


def _explain_choice(chosen: Tried | None, found: SearchResult, search: Search) -> str:
    if chosen is None:
        assert found.least is not None
        return f"nothing fits: the least that any way needs is with {found.least.label}"
    fitting = [one for one in found.tried if one.outcome.fits and one.plan.given_up == chosen.plan.given_up]
    precision_loss = "gives up no precision" if not chosen.plan.given_up else f"gives up: {chosen.plan.given_up}"
    kinds = [(tier.precision, tier.optimizer) for tier in search.tiers]
    earlier = search.tiers[: kinds.index((chosen.plan.precision, chosen.plan.optimizer))]
    gives_less = any(tier.given_up != chosen.plan.given_up for tier in earlier)
    no_less = "; what gives up less does not fit" if gives_less else ""
    if len(found.tried) == 1:
        return f"the first that was run, and it fits; it {precision_loss}"
    if len(fitting) == 1:
        return f"the only one of {len(found.tried)} that were run that fits; it {precision_loss}{no_less}"
    return f"the quickest of {len(fitting)} that fit; it {precision_loss}{no_less}"


def _assumptions(question: Question, spec: TargetSpec) -> tuple[str, ...]:
    found = [
        "Times are lower bounds at the GPU's published rates: compute and transfers one after the other. They rank "
        "configurations; real kernels reach a part of these rates.",
        f"Context lengths are searched in steps of {GRAIN} tokens, batches one by one.",
    ]
    if spec.host_memory_bytes is not None:
        found.append(f"The machine has {format_bytes(spec.host_memory_bytes)} of host memory (--host-memory).")
    if question.goal is not Goal.INFER:
        found.append(
            "Of more than two micro-batches in a step two are run: each after the second finds what the second found. "
            "Of what is not chosen the second alone, on gradients that zero_grad left as zeros."
        )
        if question.effective_batch is None:
            found.append(f"{question.batch} sequences in an optimizer step (no --effective-batch was given).")
    return tuple(found)
