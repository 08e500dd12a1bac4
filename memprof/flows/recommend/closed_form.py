"""Analytical estimate of a plan's memory, which decides which plans are run and in which order."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from memprof.errors import UsageError
from memprof.estimate.geometry import EstimatedModel, build_from_model, build_from_size
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.state import QUANTIZED_STATES
from memprof.estimate.table import find_highest_cell
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.recommend.plans import NEW_TOKENS, Activations, Goal, Plan
from memprof.spec import TargetSpec

_METHODS = {(Goal.FULL, "amp"): "mixed", (Goal.FULL, "half"): "full", (Goal.FULL, "float32"): "full"}
_GOAL_METHODS = {Goal.INFER: "inference", Goal.LORA: "lora", Goal.QLORA: "lora"}
_COLUMNS = {"nf4": "int4", "int8": "int8", "float32": "float32"}


def find_subject(spec: TargetSpec) -> EstimatedModel | None:
    """Return the model for the closed form; None if the closed form knows no model of this name, or only weights."""
    try:
        found = (build_from_size if spec.model_is_size else build_from_model)(spec.model)
    except UsageError:
        return None
    return found if found.geometry is not None else None


def make_method_plan(plan: Plan, base: TargetSpec) -> MethodPlan:
    """Return the closed form's method for a plan; an optimizer on the CPU is counted as on the GPU."""
    key = _GOAL_METHODS.get(plan.goal) or _METHODS[plan.goal, plan.precision]
    is_checkpointed = plan.activations in (Activations.CHECKPOINTED, Activations.CHECKPOINTED_OFFLOADED)
    return MethodPlan(
        METHOD_BY_KEY[f"{key}-checkpointing" if is_checkpointed else key],
        _COLUMNS.get(plan.precision, plan.half),
        lora_rank=base.lora_rank or 8,
        lora_targets=base.lora_targets,
        optimizer=plan.optimizer if plan.optimizer in QUANTIZED_STATES else "adamw",
        fused=True,
        new_tokens=NEW_TOKENS,
        chunked_loss=plan.chunked_loss,
    )


def estimate_bytes(plan: Plan, spec: TargetSpec) -> int | None:
    """Return the bytes of a GPU at batch size 1, CUDA context included; None if the closed form lacks the model."""
    subject = find_subject(spec)
    if subject is None or spec.context_length is None:
        return None
    cell = find_highest_cell(subject, make_method_plan(plan, spec), 1, spec.context_length, "", 1)
    return cell.allocated_bytes + find_spec_gpu(spec).context_bytes


def estimate_limit(
    compute_bytes: Callable[[int], int | None], available_bytes: int, first: int, high: int, step_size: int
) -> int | None:
    """Return the largest number above `first` at which the closed form `compute_bytes` is at most `available_bytes`.

    The number is a multiple of `step_size`, or `high`; None if the closed form does not know the model.
    """
    if compute_bytes(first) is None:
        return None

    def is_too_large(number: int) -> bool:
        return (compute_bytes(number) or 0) > available_bytes

    if not is_too_large(high):
        return high
    numbers = range(first // step_size * step_size + step_size, high + 1, step_size)
    place = bisect.bisect_left(numbers, True, key=is_too_large)
    return numbers[max(place - 1, 0)] if numbers else high
