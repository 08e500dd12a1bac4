"""Models that fit a GPU: for each task the largest model of the catalog that fits, and its longest context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from memprof.command_line import make_profile_command
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import check_installed
from memprof.fixes.spec_edits import find_8_bit_optimizer
from memprof.flows.gpus import device_facts, find_spec_gpu
from memprof.flows.recommend.closed_form import estimate_bytes, estimate_limit
from memprof.flows.recommend.outcome import SimulatedRun
from memprof.flows.recommend.plans import DEFAULT_CONTEXT, Goal, Plan, get_half_precision, make_base_spec
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import LargestModel, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.catalog import ModelEntry, list_models

CONTEXT_STEP = 1024  # tokens between two context lengths of a search


@dataclass(frozen=True, slots=True)
class Task:
    """A use of a model that the table has a row for, such as QLoRA."""

    name: str
    plan: Plan
    min_bytes_per_parameter: float  # a lower bound: models above the bound are not run
    likely_bytes_per_parameter: float  # an estimate where the closed form does not know the model


def list_tasks(gpu: Gpu) -> list[Task]:
    """Return the tasks of the table, by bytes per parameter.

    Bytes per parameter: weights of 4 bits 0.5, of 16 bits 2; a weight, its gradient and two states of AdamW in float32
    16; a weight and a gradient of 16 bits and two states of 8 bits 6.
    """
    half = get_half_precision(gpu)
    found = [
        Task("inference, 4-bit weights", Plan(Goal.INFER, "nf4", half), 0.5, 0.7),
        Task(f"inference, {half}", Plan(Goal.INFER, "half", half), 2.0, 2.1),
        Task("QLoRA", Plan(Goal.QLORA, "nf4", half, "adamw").minimize_memory(), 0.5, 1.1),
        Task(f"LoRA, {half}", Plan(Goal.LORA, "half", half, "adamw").minimize_memory(), 2.0, 2.3),
    ]
    optimizer = find_8_bit_optimizer()
    if optimizer is not None and half == "bfloat16":
        lean = Plan(Goal.FULL, "half", half, optimizer).minimize_memory()
        found.append(Task(f"full, {half}, 8-bit AdamW", lean, 6.0, 6.4))
    mixed = Plan(Goal.FULL, "amp", half, "adamw").minimize_memory()
    found.append(Task("full, mixed precision", mixed, 16.0, 16.5))
    return found


def recommend_largest_models(spec: TargetSpec, progress: Callable[[str], None]) -> Recommendation:
    """Return the table for `spec`'s GPU at its context length (default: 2,048 tokens), all of simulated runs.

    The model of `spec` is ignored.
    """
    gpu, context_length = find_spec_gpu(spec), spec.context_length or DEFAULT_CONTEXT
    simulator = Simulator(gpu, progress)
    kinds = []
    for task in list_tasks(gpu):
        one = task.plan.make_spec(make_base_spec(task.plan.goal, spec), 1)
        try:
            check_installed(one)
        except UsageError as error:
            simulator.error_by_label[task.name] = error.line
        else:
            kinds.append((task, one))
    # The run with the most imports: an adapter on quantized weights.
    if kinds:
        simulator.preload_imports(
            max((s for _, s in kinds), key=lambda s: (s.quantize is not None, s.adapter is not None))
        )
    rows = simulator.run_searches(
        [functools.partial(_find_largest, simulator, spec, task, context_length=context_length) for task, _ in kinds]
    )
    return Recommendation(
        device=device_facts(gpu, spec.host_memory_bytes),
        context_length=context_length,
        largest=tuple(rows),
        runs=len(simulator),
        not_applied=dict(simulator.error_by_label),
        gpu_note=gpu.note,
        assumptions=(
            "Causal language models of the catalog by their number of parameters, one sequence at a time.",
            "Those that PEFT does not know by itself are left out of LoRA and QLoRA.",
            "Training with activation checkpointing and a chunked loss. "
            f"Context lengths in steps of {CONTEXT_STEP:,} tokens.",
        ),
    )


def list_candidate_models() -> list[ModelEntry]:
    """Return the catalog's causal language models with a KV cache, by size; of models of equal size only the first."""
    found: dict[int, ModelEntry] = {}
    for entry in list_models():
        if entry.task == "causal-lm" and entry.max_positions is not None:
            found.setdefault(entry.num_parameters, entry)
    return [found[size] for size in sorted(found)]


def _find_largest(simulator: Simulator, spec: TargetSpec, task: Task, context_length: int) -> LargestModel:
    """Return the largest model that fits, by a run, and the next larger, run unless its weights alone do not fit."""
    entries = list_candidate_models()
    spec_of = functools.partial(_build_spec, spec, task)
    outcomes: dict[str, SimulatedRun | None] = {}

    def fits(place: int) -> bool | None:
        """Return whether the model at `place` fits; None if the task cannot run this model on any GPU."""
        entry = entries[place]
        if entry.num_parameters * task.min_bytes_per_parameter > simulator.usable_bytes:
            return False
        if entry.key not in outcomes:
            outcomes[entry.key] = simulator.try_run(spec_of(entry, context_length), f"{task.name}: {entry.key}")
        outcome = outcomes[entry.key]
        return None if outcome is None else outcome.fits

    begin = _estimate_start(simulator, [(entry, spec_of(entry, context_length)) for entry in entries], task)
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
    longest, too_long = _find_longest(simulator, spec, task, entry, outcome)
    shown = simulator.run(spec_of(entry, longest), task.name).spec
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
        command=make_profile_command(shown),
    )


def _estimate_start(simulator: Simulator, entries: list[tuple[ModelEntry, TargetSpec]], task: Task) -> int:
    """Return the index of the first model to run: the largest that should fit by the closed form."""

    def should_fit(place: int) -> bool:
        entry, spec = entries[place]
        needed = estimate_bytes(task.plan, spec)
        if needed is None:
            return entry.num_parameters * task.likely_bytes_per_parameter <= simulator.usable_bytes
        return needed <= simulator.gpu.total_bytes

    place = max(
        sum(entry.num_parameters * task.likely_bytes_per_parameter <= simulator.usable_bytes for entry, _ in entries)
        - 1,
        0,
    )
    while place + 1 < len(entries) and should_fit(place + 1):
        place += 1
    while place > 0 and not should_fit(place):
        place -= 1
    return place


def _build_spec(spec: TargetSpec, task: Task, entry: ModelEntry, context_length: int) -> TargetSpec:
    length = min(context_length, (entry.max_positions or context_length) - 2 * (task.plan.goal is Goal.INFER))
    base = make_base_spec(task.plan.goal, spec.edit(model=entry.key, context_length=length))
    return task.plan.make_spec(base, 1)


def _find_longest(
    simulator: Simulator, spec: TargetSpec, task: Task, entry: ModelEntry, outcome: SimulatedRun
) -> tuple[int, int | None]:
    """Return the longest context of this model that fits, and the next that was tried; multiples of CONTEXT_STEP."""
    known_length = outcome.target.context_length or 0
    high = (entry.max_positions or 0) - 2 * (task.plan.goal is Goal.INFER)
    if high <= known_length:
        return known_length, None

    def needed(length: int) -> int | None:
        return estimate_bytes(task.plan, _build_spec(spec, task, entry, length))

    likely = estimate_limit(needed, simulator.gpu.total_bytes, known_length, high, CONTEXT_STEP)
    try:
        limit = simulator.find_run_limit(
            lambda length: _build_spec(spec, task, entry, length),
            lambda length: f"{task.name}: {entry.key} at {length:,} tokens",
            start=known_length,
            high=high,
            step_size=CONTEXT_STEP,
            estimate=likely,
        )
    except MemprofError:
        return known_length, None
    return limit.largest or known_length, limit.first_too_large
