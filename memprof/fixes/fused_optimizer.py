"""Fix fused-optimizer: the fused implementation of torch's optimizers, for an existing optimizer or a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import ONE_OPTIMIZER, OPTIMIZER, SAME_UPDATES, Fix, Numerics
from memprof.fixes.optimizers import adamw, make_optimizer, trained_parameters


@Fix(
    name="fused-optimizer", order=220, numerics=Numerics.EXACT, saves=("temporaries",),
    changes="an optimizer step is one kernel for many parameters, which needs no temporaries",
    cost="none: it is faster",
    options={"optimizer": OPTIMIZER + ", or an optimizer that is there; AdamW at 1e-4 if not given"},
    training_only=True,
    conflicts={
        "optimizer-in-backward": "give that a fused one: optimizer=lambda p: torch.optim.AdamW(p, fused=True)",
        "8-bit-optimizer": ONE_OPTIMIZER,
        "cpu-offload-optimizer": ONE_OPTIMIZER,
    },
    edits={"optimizer_impl": "fused"}, ladder=70, outside=40, search=70, tiers=SAME_UPDATES,
    helps={"optimizer-step-temporaries": 10},
)  # fmt: skip
def install(
    model: nn.Module, changes: Changes, *, optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] = adamw
) -> None:
    """Switch an existing optimizer, which keeps its state, or a new one to the fused implementation; the optimizer is
    the result. Raises UsageError: the class has no fused implementation; it is on already; or options exclude it."""
    parameters = trained_parameters(model, changes.fix)
    made = optimizer if isinstance(optimizer, Optimizer) else make_optimizer(optimizer, parameters)
    name = type(made).__name__
    if not all("fused" in group for group in made.param_groups):
        raise changes.does_not_apply("there is no fused implementation", name)
    groups = [group for group in made.param_groups if not group["fused"]]
    if not groups and made is optimizer:
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
            _place_step(made.state.get(parameter), parameter, changes)
    # What GradScaler asks for: fused steps unscale the gradients themselves.
    if groups:
        changes.set_attribute(made, "_step_supports_amp_scaling", True)
    changes.result(made)
    changes.note(f"{name} of {sum(len(group['params']) for group in made.param_groups)} parameters is fused")


def _place_step(state: dict[str, Any] | None, parameter: torch.Tensor, changes: Changes) -> None:
    """Move the optimizer's step count to the parameter's device, where fused kernels read it (torch/optim/adam.py)."""
    step = None if state is None else state.get("step")
    if state is not None and isinstance(step, torch.Tensor) and step.device != parameter.device:
        changes.set_item(state, "step", step.to(parameter.device))
