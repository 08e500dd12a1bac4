"""The needs of a way to run by the closed form: it says which runs are worth making, and which first."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from memprof.errors import UsageError
from memprof.estimate.geometry import Subject, from_model, from_size
from memprof.estimate.methods import BY_KEY, MethodPlan
from memprof.estimate.state import QUANTIZED_STATES
from memprof.estimate.table import highest_cell
from memprof.flows.gpus import find_gpu_of
from memprof.flows.recommend.plans import NEW_TOKENS, Activations, Goal, Plan
from memprof.spec import TargetSpec

_METHODS = {(Goal.FULL, "amp"): "mixed", (Goal.FULL, "half"): "full", (Goal.FULL, "float32"): "full"}
_OF_GOAL = {Goal.INFER: "inference", Goal.LORA: "lora", Goal.QLORA: "lora"}
_COLUMNS = {"nf4": "int4", "int8": "int8", "float32": "float32"}


def subject_of(spec: TargetSpec) -> Subject | None:
    """Return the model as the closed form knows it; None if it does not, or knows nothing but its weights."""
    try:
        found = (from_size if spec.model_is_size else from_model)(spec.model)
    except UsageError:
        return None
    return found if found.geometry is not None else None


def estimated(plan: Plan, base: TargetSpec) -> MethodPlan:
    """Return the closed form's row and column of a plan; what an optimizer on the CPU saves is not in it."""
    key = _OF_GOAL.get(plan.goal) or _METHODS[plan.goal, plan.precision]
    checkpointed = plan.activations in (Activations.CHECKPOINTED, Activations.BOTH)
    return MethodPlan(
        BY_KEY[f"{key}-checkpointing" if checkpointed else key],
        _COLUMNS.get(plan.precision, plan.half),
        lora_rank=base.lora_rank or 8,
        lora_targets=base.lora_targets,
        optimizer=plan.optimizer if plan.optimizer in QUANTIZED_STATES else "adamw",
        fused=True,
        new_tokens=NEW_TOKENS,
        chunked_loss=plan.chunked_loss,
    )


def needed_bytes(plan: Plan, spec: TargetSpec) -> int | None:
    """Return what one sequence needs of a GPU, context included; None where the closed form does not know the model."""
    subject = subject_of(spec)
    if subject is None or spec.context_length is None:
        return None
    cell = highest_cell(subject, estimated(plan, spec), 1, spec.context_length, "", 1)
    return cell.allocated_bytes + find_gpu_of(spec).context_bytes


def likely_limit(needed: Callable[[int], int | None], available: int, first: int, high: int, grain: int) -> int | None:
    """Return where to look for the largest number above `first`, which fits, of which `available` is enough.

    It is a multiple of `grain`, or `high`; None where the closed form, which gives `needed`, does not know the model.
    """
    if needed(first) is None:
        return None

    def is_more(number: int) -> bool:
        return (needed(number) or 0) > available

    if not is_more(high):
        return high
    numbers = range(first // grain * grain + grain, high + 1, grain)
    place = bisect.bisect_left(numbers, True, key=is_more)
    return numbers[max(place - 1, 0)] if numbers else high
