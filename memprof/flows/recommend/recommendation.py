"""The recommendation for a model, a goal and a GPU: the configuration, its limits and code to paste."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from memprof.command_line import make_profile_command
from memprof.errors import MemprofError
from memprof.flows.gpus import find_spec_gpu, make_device_facts
from memprof.flows.recommend.alternatives import find_alternatives
from memprof.flows.recommend.plans import Goal
from memprof.flows.recommend.search import CONTEXT_STEP, TIE_TOLERANCE, PlanRun, Search, SearchRequest, SearchResult
from memprof.flows.recommend.simulator import Simulator
from memprof.flows.recommend.single_gpu_scripts import build_scripts
from memprof.report.documents.recommendation import Configuration, Recommendation
from memprof.spec import TargetSpec
from memprof.trace.facts import Target
from memprof.units import format_bytes


def recommend(
    spec: TargetSpec, request: SearchRequest, progress: Callable[[str], None]
) -> tuple[Recommendation, Search, SearchResult]:
    """Search configurations for the model and GPU of `spec`; return recommendation, search and its result."""
    gpu, goal = find_spec_gpu(spec), request.goal
    if gpu.unified_bytes is not None:
        host_bytes = min(spec.host_memory_bytes or gpu.unified_bytes, gpu.unified_bytes)
        spec = spec.edit(host_memory_bytes=host_bytes)
    simulator = Simulator(gpu, progress)
    search = Search(simulator, spec, request)
    if goal is Goal.INFER and search.run_plan(search.tiers[0], request.batch_size) is None:
        # The model does not decode: only its forward is run.
        simulator.error_by_label.clear()
        search.base_spec = search.base_spec.edit(new_tokens=None)
    result = search.search()
    if not result.runs:
        if simulator.last_error is not None and set(simulator.error_by_label.values()) == {
            simulator.last_error.line
        }:  # concerns every goal
            raise simulator.last_error
        run_label, reason = next(iter(simulator.error_by_label.items()))
        raise MemprofError(f"the goal {goal.value} cannot be run with this model", value=f"{run_label}: {reason}")
    chosen = None if result.chosen is None else search.confirm_run(result.chosen)
    if chosen is not None and not chosen.outcome.fits:
        # Happens if only zeroed gradients made the run fit: leaner configurations are confirmed in turn.
        leaner_runs = sorted((run for run in result.runs if run.outcome.fits), key=lambda run: run.outcome.needed_bytes)
        chosen = next((run for run in map(search.confirm_run, leaner_runs) if run.outcome.fits), None)
    example_run = chosen or result.leanest
    assert example_run is not None
    target = example_run.outcome.target
    fields: dict[str, Any] = {}
    if chosen is not None:
        limits = [functools.partial(search.find_batch_limit, chosen)]
        if target.vocab_size is not None:
            limits.append(functools.partial(search.find_context_limit, chosen, target.max_positions))
        fields = dict(
            zip(("batch", "context"), simulator.run_searches(limits, "largest batch and context"), strict=False)
        )
        fields["snippets"] = build_scripts(chosen.plan, chosen.outcome.spec, chosen.accumulation)
    else:
        fields["alternatives"] = find_alternatives(search, example_run)
    recommendation = build_recommendation(
        simulator,
        spec.host_memory_bytes,
        target,
        _build_search_rows(simulator, result.runs, chosen),
        fits=chosen is not None,
        goal=goal.value,
        effective_batch=request.batch_size,
        reason=_explain_choice(chosen, result, search),
        assumptions=_list_assumptions(request, spec),
        **fields,
    )
    return recommendation, search, dataclasses.replace(result, chosen=chosen)


def build_recommendation(
    simulator: Simulator,
    host_bytes: int | None,
    target: Target,
    rows: tuple[Configuration, ...],
    *,
    fits: bool,
    **fields: Any,
) -> Recommendation:
    """Return a Recommendation with the table `rows`; if `fits`, the first row is the chosen configuration."""
    return Recommendation(
        device=make_device_facts(simulator.gpu, host_bytes),
        model=target.model,
        num_parameters=target.num_parameters,
        context_length=target.context_length or 0,
        chosen=rows[0] if fits else None,
        choices=rows,
        max_positions=target.max_positions,
        runs=len(simulator),
        not_applied=dict(simulator.error_by_label),
        gpu_note=simulator.gpu.note,
        **fields,
    )


def _build_search_rows(
    simulator: Simulator, runs: tuple[PlanRun, ...], chosen: PlanRun | None
) -> tuple[Configuration, ...]:
    """Return the rows of all runs of a search, the chosen one first, then by time of a step."""
    rest = [run for run in runs if chosen is None or (run.plan, run.micro_batch) != (chosen.plan, chosen.micro_batch)]
    rest.sort(key=lambda run: (not run.outcome.fits, run.outcome.seconds, run.outcome.needed_bytes))
    return build_rows(simulator, [("", run) for run in ([] if chosen is None else [chosen]) + rest])


def build_rows(simulator: Simulator, runs: Sequence[tuple[str, PlanRun]]) -> tuple[Configuration, ...]:
    """Return a table row for each of `runs`, which are pairs of an argument of `--parallel` ("": one GPU) and a run."""
    points = [(run.outcome.needed_bytes, run.outcome.seconds) for _, run in runs]
    return tuple(
        _build_row(simulator, parallel, run, pareto=_is_pareto_optimal(point, points))
        for (parallel, run), point in zip(runs, points, strict=True)
    )


def _is_pareto_optimal(point: tuple[int, float], points: list[tuple[int, float]]) -> bool:
    """Return whether no other of `points` (bytes, seconds) is at most `point` in both (the Pareto front)."""
    return not any(
        other != point
        and other[0] <= point[0]
        and other[1] <= point[1] * (1 - TIE_TOLERANCE if other[0] == point[0] else 1)
        for other in points
    )


def _build_row(simulator: Simulator, parallel: str, run: PlanRun, *, pareto: bool) -> Configuration:
    plan, outcome, step = run.plan, run.outcome, run.outcome.step
    settings = {
        "precision": plan.precision if plan.precision not in ("half", "amp") else f"{plan.precision} ({plan.half})",
        "optimizer": plan.optimizer,
        "activations": plan.activations.value,
        "chunked_loss": plan.chunked_loss,
        "attention": outcome.spec.attention,
        "alloc_conf": outcome.spec.alloc_conf,
    }
    return Configuration(
        name=f"{parallel}: {plan.format_label()}" if parallel else plan.format_label(),
        settings=settings,
        command=make_profile_command(outcome.spec),
        micro_batch=run.micro_batch,
        accumulation=run.accumulation,
        needed_bytes=outcome.needed_bytes,
        host_bytes=outcome.host_bytes,
        headroom_bytes=simulator.gpu.total_bytes - outcome.needed_bytes,
        fits=outcome.fits,
        step_seconds=None if step is None else step.seconds,
        compute_seconds=None if step is None else step.compute_seconds,
        bus_seconds=None if step is None else step.bus_seconds,
        link_seconds=None if step is None else step.link_seconds,
        given_up=plan.precision_loss,
        pareto=pareto,
        oom_stage=outcome.oom_stage,
        parallel=parallel or None,
    )


def _explain_choice(chosen: PlanRun | None, result: SearchResult, search: Search) -> str:
    if chosen is None:
        assert result.leanest is not None
        return f"nothing fits: the least that any way needs is with {result.leanest.label}"
    fitting = [run for run in result.runs if run.outcome.fits and run.plan.precision_loss == chosen.plan.precision_loss]
    precision_loss = (
        "gives up no precision" if not chosen.plan.precision_loss else f"gives up: {chosen.plan.precision_loss}"
    )
    tier_keys = [(tier.precision, tier.optimizer) for tier in search.tiers]
    earlier_tiers = search.tiers[: tier_keys.index((chosen.plan.precision, chosen.plan.optimizer))]
    skips_less_loss = any(tier.precision_loss != chosen.plan.precision_loss for tier in earlier_tiers)
    suffix = "; what gives up less does not fit" if skips_less_loss else ""
    if len(result.runs) == 1:
        return f"the first that was run, and it fits; it {precision_loss}"
    if len(fitting) == 1:
        return f"the only one of {len(result.runs)} that were run that fits; it {precision_loss}{suffix}"
    return f"the quickest of {len(fitting)} that fit; it {precision_loss}{suffix}"


def _list_assumptions(request: SearchRequest, spec: TargetSpec) -> tuple[str, ...]:
    assumptions = [
        "Times are lower bounds at the GPU's published rates: compute and transfers one after the other. They rank "
        "configurations; real kernels reach a part of these rates.",
        f"Context lengths are searched in steps of {CONTEXT_STEP} tokens, batches one by one.",
    ]
    if spec.host_memory_bytes is not None:
        assumptions.append(f"The machine has {format_bytes(spec.host_memory_bytes)} of host memory (--host-memory).")
    if request.goal is not Goal.INFER:
        assumptions.append(
            "Of more than two micro-batches in a step two are run: each after the second finds what the second found. "
            "Of what is not chosen the second alone, on gradients that zero_grad left as zeros."
        )
        if request.effective_batch is None:
            assumptions.append(f"{request.batch_size} sequences in an optimizer step (no --effective-batch was given).")
    return tuple(assumptions)
