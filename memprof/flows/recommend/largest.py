"""Models that fit a GPU: for each task the largest model of the catalog that fits, and its longest context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from memprof.command_line import profile_command
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import check_installed
from memprof.fixes.spec_edits import installed_eight_bit_optimizer
from memprof.flows.gpus import device_facts, find_gpu_of
from memprof.flows.recommend.closed_form import likely_limit, needed_bytes
from memprof.flows.recommend.outcome import SimulatedRun
from memprof.flows.recommend.plans import DEFAULT_CONTEXT, Goal, Plan, base_spec, half_of
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import LargestModel, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.catalog import ModelEntry, list_models

GRAIN = 1024  # tokens between two context lengths of a search


@dataclass(frozen=True, slots=True)
class Task:
    """One way to use a model."""

    name: str
    plan: Plan
    least_bytes: float  # per parameter, a lower bound: models above it are not run
    likely_bytes: float  # per parameter, an estimate where the closed form does not know the model


def tasks(gpu: Gpu) -> list[Task]:
    """Return the tasks of the table, by bytes per parameter.

    Bytes per parameter: weights of 4 bits 0.5, of 16 bits 2; a weight, its gradient and two states of AdamW in float32
    16; a weight and a gradient of 16 bits and two states of 8 bits 6.
    """
    half = half_of(gpu)
    found = [
        Task("inference, 4-bit weights", Plan(Goal.INFER, "nf4", half), 0.5, 0.7),
        Task(f"inference, {half}", Plan(Goal.INFER, "half", half), 2.0, 2.1),
        Task("QLoRA", Plan(Goal.QLORA, "nf4", half, "adamw").leanest(), 0.5, 1.1),
        Task(f"LoRA, {half}", Plan(Goal.LORA, "half", half, "adamw").leanest(), 2.0, 2.3),
    ]
    optimizer = installed_eight_bit_optimizer()
    if optimizer is not None and half == "bfloat16":
        lean = Plan(Goal.FULL, "half", half, optimizer).leanest()
        found.append(Task(f"full, {half}, 8-bit AdamW", lean, 6.0, 6.4))
    mixed = Plan(Goal.FULL, "amp", half, "adamw").leanest()
    found.append(Task("full, mixed precision", mixed, 16.0, 16.5))
    return found


def recommend_models(spec: TargetSpec, progress: Callable[[str], None]) -> Recommendation:
    """Return the table for `spec`'s GPU at its context length (default: 2,048 tokens), all of simulated runs.

    The model of `spec` is ignored.
    """
    gpu, context_length = find_gpu_of(spec), spec.context_length or DEFAULT_CONTEXT
    runs = Simulator(gpu, progress)
    kinds = []
    for task in tasks(gpu):
        one = task.plan.spec(base_spec(task.plan.goal, spec), 1)
        try:
            check_installed(one)
        except UsageError as error:
            runs.failures[task.name] = error.line
        else:
            kinds.append((task, one))
    # The run with the most imports: an adapter on quantized weights.
    if kinds:
        runs.warm_up(max((s for _, s in kinds), key=lambda s: (s.quantize is not None, s.adapter is not None)))
    rows = runs.run_searches(
        [functools.partial(_find_largest, runs, spec, task, context_length=context_length) for task, _ in kinds]
    )
    return Recommendation(
        device=device_facts(gpu, spec.host_memory_bytes),
        context_length=context_length,
        largest=tuple(rows),
        runs=len(runs),
        not_applied=dict(runs.failures),
        gpu_note=gpu.note,
        assumptions=(
            "Causal language models of the catalog by their number of parameters, one sequence at a time.",
            "Those that PEFT does not know by itself are left out of LoRA and QLoRA.",
            f"Training with activation checkpointing and a chunked loss. Context lengths in steps of {GRAIN:,} tokens.",
        ),
    )


def candidates() -> list[ModelEntry]:
    """Return the catalog's causal language models with a KV cache, by size; of models of equal size only the first."""
    found: dict[int, ModelEntry] = {}
    for entry in list_models():
        if entry.task == "causal-lm" and entry.max_positions is not None:
            found.setdefault(entry.num_parameters, entry)
    return [found[size] for size in sorted(found)]


def _find_largest(runs: Simulator, spec: TargetSpec, task: Task, context_length: int) -> LargestModel:
    """Return the largest model that fits, by a run, and the next larger, run unless its weights alone do not fit."""
    entries = candidates()
    spec_of = functools.partial(_build_spec, spec, task)
    outcomes: dict[str, SimulatedRun | None] = {}

    def fits(place: int) -> bool | None:
        """Return whether the model at `place` fits; None if the task cannot run this model on any GPU."""
        entry = entries[place]
        if entry.num_parameters * task.least_bytes > runs.usable_bytes:
            return False
        if entry.key not in outcomes:
            outcomes[entry.key] = runs.try_run(spec_of(entry, context_length), f"{task.name}: {entry.key}")
        outcome = outcomes[entry.key]
        return None if outcome is None else outcome.fits

    begin = _estimate_start(runs, [(entry, spec_of(entry, context_length)) for entry in entries], task)
    place = next((place for place in range(begin, -1, -1) if fits(place)), None)
    for higher in range(begin + 1 if place == begin else len(entries), len(entries)):
        answer = fits(higher)
        if answer:
            place = higher
        elif answer is False:
            break
    first = 0 if place is None else place + 1
    after = next((entry for entry in entries[first:] if outcomes.get(entry.key, ...) is not None), None)
    failed = None if after is None else outcomes.get(after.key)
    if place is None:
        needed = None if failed is None else failed.needed_bytes
        return LargestModel(task.name, None, 0, 0, context_length, None, None, after.key if after else None, needed, "")
    entry, outcome = entries[place], outcomes[entries[place].key]
    assert outcome is not None
    longest, too_long = _find_longest(runs, spec, task, entry, outcome)
    shown = runs.run(spec_of(entry, longest), task.name).spec
    return LargestModel(
        task=task.name,
        model=entry.key,
        num_parameters=entry.num_parameters,
        needed_bytes=outcome.needed_bytes,
        at_context=outcome.target.context_length or 0,
        context_length=longest,
        first_too_long=too_long,
        next_model=None if after is None else after.key,
        next_needed_bytes=None if failed is None else failed.needed_bytes,
        command=profile_command(shown),
    )


def _estimate_start(runs: Simulator, entries: list[tuple[ModelEntry, TargetSpec]], task: Task) -> int:
    """Return the index of the first model to run: the largest that should fit by the closed form."""

    def should_fit(place: int) -> bool:
        entry, spec = entries[place]
        needed = needed_bytes(task.plan, spec)
        if needed is None:
            return entry.num_parameters * task.likely_bytes <= runs.usable_bytes
        return needed <= runs.gpu.total_bytes

    place = max(sum(entry.num_parameters * task.likely_bytes <= runs.usable_bytes for entry, _ in entries) - 1, 0)
    while place + 1 < len(entries) and should_fit(place + 1):
        place += 1
    while place > 0 and not should_fit(place):
        place -= 1
    return place


def _build_spec(spec: TargetSpec, task: Task, entry: ModelEntry, context_length: int) -> TargetSpec:
    length = min(context_length, (entry.max_positions or context_length) - 2 * (task.plan.goal is Goal.INFER))
    base = base_spec(task.plan.goal, spec.edit(model=entry.key, context_length=length))
    return task.plan.spec(base, 1)


def _find_longest(
    runs: Simulator, spec: TargetSpec, task: Task, entry: ModelEntry, outcome: SimulatedRun
) -> tuple[int, int | None]:
    """Return the longest context of this model that fits, and the next that was tried; multiples of GRAIN."""
    known_length = outcome.target.context_length or 0
    high = (entry.max_positions or 0) - 2 * (task.plan.goal is Goal.INFER)
    if high <= known_length:
        return known_length, None

    def needed(length: int) -> int | None:
        return needed_bytes(task.plan, _build_spec(spec, task, entry, length))

    likely = likely_limit(needed, runs.gpu.total_bytes, known_length, high, GRAIN)
    try:
        limit = runs.limit(
            lambda length: _build_spec(spec, task, entry, length),
            lambda length: f"{task.name}: {entry.key} at {length:,} tokens",
            begin=known_length,
            high=high,
            grain=GRAIN,
            likely=likely,
        )
    except MemprofError:
        return known_length, None
    return limit.largest or known_length, limit.first_too_large
