"""Fix fused-optimizer: the fused implementation of torch's optimizers, for an existing optimizer or a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import EXACT_UPDATE_TIERS, ONE_OPTIMIZER, OPTIMIZER, Fix, Numerics
from memprof.fixes.optimizers import adamw, list_trained_parameters, make_optimizer


@Fix(
    name="fused-optimizer", order=220, numerics=Numerics.EXACT, saves=("temporaries",),
    changes="step the optimizer in one kernel for many parameters, without temporaries",
    cost="none: it is faster",
    options={"optimizer": OPTIMIZER + ", or an optimizer that is there; AdamW at 1e-4 if not given"},
    training_only=True,
    conflicts={
        "optimizer-in-backward": "give that a fused one: optimizer=lambda p: torch.optim.AdamW(p, fused=True)",
        "8-bit-optimizer": ONE_OPTIMIZER,
        "cpu-offload-optimizer": ONE_OPTIMIZER,
    },
    edits={"optimizer_impl": "fused"}, ladder_order=70, script_order=40, search_order=70, tiers=EXACT_UPDATE_TIERS,
)  # fmt: skip
def install(
    model: nn.Module, changes: Changes, *, optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] = adamw
) -> None:
    """Switch `optimizer`, or a new one if it is a function, to the fused implementation; the optimizer is the fix's
    result. Raises UsageError if its class has no fused implementation, is fused already, or has options against it."""
    parameters = list_trained_parameters(model, changes.fix)
    fused = optimizer if isinstance(optimizer, Optimizer) else make_optimizer(optimizer, parameters)
    name = type(fused).__name__
    if not all("fused" in group for group in fused.param_groups):
        raise changes.does_not_apply("there is no fused implementation", name)
    groups = [group for group in fused.param_groups if not group["fused"]]
    if not groups and fused is optimizer:
        raise changes.already_on(name)
    for group in groups:
        if group.get("differentiable"):
            raise changes.does_not_apply("it is not differentiable", name)
        if not all(parameter.is_floating_point() for parameter in group["params"]):
            raise changes.does_not_apply("parameters are not real numbers", name)
    if name == "Adagrad" and any(p.is_cuda for group in groups for p in group["params"]):
        raise changes.does_not_apply("there is no fused implementation for CUDA", name)
    for group in groups:
        for key, value in (("fused", True), ("foreach", False)):
            if key in group:
                changes.set_item(group, key, value)
        for parameter in group["params"]:
            _move_step_count(fused.state.get(parameter), parameter, changes)
    # What GradScaler asks for: fused steps unscale the gradients themselves.
    if groups:
        changes.set_attribute(fused, "_step_supports_amp_scaling", True)
    changes.result(fused)
    changes.note(f"{name} of {sum(len(group['params']) for group in fused.param_groups)} parameters is fused")


def _move_step_count(state: dict[str, Any] | None, parameter: torch.Tensor, changes: Changes) -> None:
    """Move the step count in a parameter's `state` to the parameter's device, where fused kernels read it."""
    step = None if state is None else state.get("step")
    if state is not None and isinstance(step, torch.Tensor) and step.device != parameter.device:
        changes.set_item(state, "step", step.to(parameter.device))
