"""Memory of a plan by the analytical estimate (closed form), which selects and orders the simulated runs."""

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

_FULL_METHOD_BY_PRECISION = {(Goal.FULL, "amp"): "mixed", (Goal.FULL, "half"): "full", (Goal.FULL, "float32"): "full"}
_METHOD_BY_GOAL = {Goal.INFER: "inference", Goal.LORA: "lora", Goal.QLORA: "lora"}
_DTYPE_BY_PRECISION = {"nf4": "int4", "int8": "int8", "float32": "float32"}


def find_estimated_model(spec: TargetSpec) -> EstimatedModel | None:
    """Return the model's shape for the analytical estimate; None if the model or its activations are unknown to it."""
    try:
        model = (build_from_size if spec.model_is_size else build_from_model)(spec.model)
    except UsageError:
        return None
    return model if model.geometry is not None else None


def make_method_plan(plan: Plan, base_spec: TargetSpec) -> MethodPlan:
    """Return `plan` in the terms of the analytical estimate; an optimizer on the CPU is counted as on the GPU."""
    method_key = _METHOD_BY_GOAL.get(plan.goal) or _FULL_METHOD_BY_PRECISION[plan.goal, plan.precision]
    is_checkpointed = plan.activations in (Activations.CHECKPOINTED, Activations.CHECKPOINTED_OFFLOADED)
    return MethodPlan(
        METHOD_BY_KEY[f"{method_key}-checkpointing" if is_checkpointed else method_key],
        _DTYPE_BY_PRECISION.get(plan.precision, plan.half),
        lora_rank=base_spec.lora_rank or 8,
        lora_targets=base_spec.lora_targets,
        optimizer=plan.optimizer if plan.optimizer in QUANTIZED_STATES else "adamw",
        fused=True,
        new_tokens=NEW_TOKENS,
        chunked_loss=plan.chunked_loss,
    )


def estimate_bytes(plan: Plan, spec: TargetSpec) -> int | None:
    """Return the estimated GPU memory in bytes at batch size 1, with the CUDA context; None for unknown models."""
    estimated_model = find_estimated_model(spec)
    if estimated_model is None or spec.context_length is None:
        return None
    cell = find_highest_cell(estimated_model, make_method_plan(plan, spec), 1, spec.context_length, "", 1)
    return cell.allocated_bytes + find_spec_gpu(spec).context_bytes


def estimate_limit(
    compute_bytes: Callable[[int], int | None], available_bytes: int, low: int, high: int, step_size: int
) -> int | None:
    """Return the largest number above `low` at which the estimate `compute_bytes` is at most `available_bytes`.

    The number is a multiple of `step_size`, or `high`; None if `compute_bytes` returns None.
    """
    if compute_bytes(low) is None:
        return None

    def is_too_large(number: int) -> bool:
        return (compute_bytes(number) or 0) > available_bytes

    if not is_too_large(high):
        return high
    numbers = range(low // step_size * step_size + step_size, high + 1, step_size)
    index = bisect.bisect_left(numbers, True, key=is_too_large)
    return numbers[max(index - 1, 0)] if numbers else high
