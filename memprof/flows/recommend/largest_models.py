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
from memprof.flows.gpus import find_spec_gpu, make_device_facts
from memprof.flows.recommend.closed_form import estimate_bytes, estimate_limit
from memprof.flows.recommend.outcome import SimulatedRun
from memprof.flows.recommend.plans import DEFAULT_CONTEXT, Goal, Plan, make_base_spec
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import LargestModel, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.catalog import ModelEntry, list_models

CONTEXT_STEP = 1024  # tokens between two context lengths of a search


@dataclass(frozen=True, slots=True)
class Task:
    """A task that the table of the largest models has a row for, such as QLoRA or inference."""

    name: str
    plan: Plan
    min_bytes_per_parameter: float  # a lower bound: models above the bound are not run
    likely_bytes_per_parameter: float  # an estimate where the closed form does not know the model


def list_tasks(gpu: Gpu) -> list[Task]:
    """Return the tasks of the table.

    Bytes per parameter: weights of 4 bits 0.5, of 16 bits 2; a weight, its gradient and two states of AdamW in float32
    16; a weight and a gradient of 16 bits and two states of 8 bits 6.
    """
    half = gpu.half_precision
    tasks = [
        Task("inference, 4-bit weights", Plan(Goal.INFER, "nf4", half), 0.5, 0.7),
        Task(f"inference, {half}", Plan(Goal.INFER, "half", half), 2.0, 2.1),
        Task("QLoRA", Plan(Goal.QLORA, "nf4", half, "adamw").minimize_memory(), 0.5, 1.1),
        Task(f"LoRA, {half}", Plan(Goal.LORA, "half", half, "adamw").minimize_memory(), 2.0, 2.3),
    ]
    optimizer = find_8_bit_optimizer()
    if optimizer is not None and half == "bfloat16":
        full_plan = Plan(Goal.FULL, "half", half, optimizer).minimize_memory()
        tasks.append(Task(f"full, {half}, 8-bit AdamW", full_plan, 6.0, 6.4))
    mixed_plan = Plan(Goal.FULL, "amp", half, "adamw").minimize_memory()
    tasks.append(Task("full, mixed precision", mixed_plan, 16.0, 16.5))
    return tasks


def recommend_largest_models(spec: TargetSpec, progress: Callable[[str], None]) -> Recommendation:
    """Return a table of the largest model that fits the GPU of `spec` for each task, by simulated runs.

    The context length is that of `spec` (default: 2,048 tokens). The model of `spec` is ignored.
    """
    gpu, context_length = find_spec_gpu(spec), spec.context_length or DEFAULT_CONTEXT
    simulator = Simulator(gpu, progress)
    kinds = []
    for task in list_tasks(gpu):
        task_spec = task.plan.make_spec(make_base_spec(task.plan.goal, spec), 1)
        try:
            check_installed(task_spec)
        except UsageError as error:
            simulator.error_by_label[task.name] = error.line
        else:
            kinds.append((task, task_spec))
    # The run with the most imports: an adapter on quantized weights.
    if kinds:
        simulator.preload_imports(
            max((spec for _, spec in kinds), key=lambda spec: (spec.quantize is not None, spec.adapter is not None))
        )
    rows = simulator.run_searches(
        [functools.partial(_find_largest, simulator, spec, task, context_length=context_length) for task, _ in kinds],
        "largest models",
    )
    return Recommendation(
        device=make_device_facts(gpu, spec.host_memory_bytes),
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
    entry_by_size: dict[int, ModelEntry] = {}
    for entry in list_models():
        if entry.task == "causal-lm" and entry.max_positions is not None:
            entry_by_size.setdefault(entry.num_parameters, entry)
    return [entry_by_size[size] for size in sorted(entry_by_size)]


def _find_largest(simulator: Simulator, spec: TargetSpec, task: Task, context_length: int) -> LargestModel:
    """Return the row of a task: the largest model that fits, its longest context, and the next larger model."""
    entries = list_candidate_models()
    make_spec = functools.partial(_build_spec, spec, task)
    outcomes: dict[str, SimulatedRun | None] = {}

    def fits(index: int) -> bool | None:
        """Return whether the model `entries[index]` fits; None if the task cannot run this model on any GPU."""
        entry = entries[index]
        if entry.num_parameters * task.min_bytes_per_parameter > simulator.usable_bytes:
            return False
        if entry.key not in outcomes:
            outcomes[entry.key] = simulator.try_run(make_spec(entry, context_length), f"{task.name}: {entry.key}")
        outcome = outcomes[entry.key]
        return None if outcome is None else outcome.fits

    start = _estimate_start(simulator, [(entry, make_spec(entry, context_length)) for entry in entries], task)
    index = next((index for index in range(start, -1, -1) if fits(index)), None)
    for larger_index in range(start + 1 if index == start else len(entries), len(entries)):
        larger_fits = fits(larger_index)
        if larger_fits:
            index = larger_index
        elif larger_fits is False:
            break
    next_index = 0 if index is None else index + 1
    after = next((entry for entry in entries[next_index:] if outcomes.get(entry.key, ...) is not None), None)
    next_outcome = None if after is None else outcomes.get(after.key)
    if index is None:
        needed = None if next_outcome is None else next_outcome.needed_bytes
        return LargestModel(task.name, None, 0, 0, context_length, None, None, after.key if after else None, needed, "")
    entry, outcome = entries[index], outcomes[entries[index].key]
    assert outcome is not None
    longest_context, first_too_long = _find_longest_context(simulator, spec, task, entry, outcome)
    shown_spec = simulator.run(make_spec(entry, longest_context), task.name).spec
    return LargestModel(
        task=task.name,
        model=entry.key,
        num_parameters=entry.num_parameters,
        needed_bytes=outcome.needed_bytes,
        at_context=outcome.target.context_length or 0,
        context_length=longest_context,
        first_too_long=first_too_long,
        next_model=None if after is None else after.key,
        next_needed_bytes=None if next_outcome is None else next_outcome.needed_bytes,
        command=make_profile_command(shown_spec),
    )


def _estimate_start(simulator: Simulator, entries: list[tuple[ModelEntry, TargetSpec]], task: Task) -> int:
    """Return the index of the first model to run: the largest that fits by the analytical estimate."""

    def should_fit(index: int) -> bool:
        entry, spec = entries[index]
        needed_bytes = estimate_bytes(task.plan, spec)
        if needed_bytes is None:
            return entry.num_parameters * task.likely_bytes_per_parameter <= simulator.usable_bytes
        return needed_bytes <= simulator.gpu.total_bytes

    index = max(
        sum(entry.num_parameters * task.likely_bytes_per_parameter <= simulator.usable_bytes for entry, _ in entries)
        - 1,
        0,
    )
    while index + 1 < len(entries) and should_fit(index + 1):
        index += 1
    while index > 0 and not should_fit(index):
        index -= 1
    return index


def _build_spec(spec: TargetSpec, task: Task, entry: ModelEntry, context_length: int) -> TargetSpec:
    length = min(context_length, (entry.max_positions or context_length) - 2 * (task.plan.goal is Goal.INFER))
    base = make_base_spec(task.plan.goal, spec.edit(model=entry.key, context_length=length))
    return task.plan.make_spec(base, 1)


def _find_longest_context(
    simulator: Simulator, spec: TargetSpec, task: Task, entry: ModelEntry, outcome: SimulatedRun
) -> tuple[int, int | None]:
    """Return the longest context length of a model that fits, and the next larger length tried, both in tokens."""
    fitting_length = outcome.target.context_length or 0
    high = (entry.max_positions or 0) - 2 * (task.plan.goal is Goal.INFER)
    if high <= fitting_length:
        return fitting_length, None

    def estimate(length: int) -> int | None:
        return estimate_bytes(task.plan, _build_spec(spec, task, entry, length))

    estimated_limit = estimate_limit(estimate, simulator.gpu.total_bytes, fitting_length, high, CONTEXT_STEP)
    try:
        limit = simulator.find_run_limit(
            lambda length: _build_spec(spec, task, entry, length),
            lambda length: f"{task.name}: {entry.key} at {length:,} tokens",
            start=fitting_length,
            high=high,
            step_size=CONTEXT_STEP,
            estimate=estimated_limit,
        )
    except MemprofError:
        return fitting_length, None
    return limit.largest or fitting_length, limit.first_too_large
