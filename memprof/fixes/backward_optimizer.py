"""Fix optimizer-in-backward: each parameter has its own optimizer, which steps as soon as the gradient is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import EXACT_UPDATE_TIERS, NO_OPTIMIZER, OPTIMIZER, Fix, Numerics
from memprof.fixes.optimizers import list_trained_parameters, make_optimizer, refuse_gradients


@Fix(
    name="optimizer-in-backward", order=240, numerics=Numerics.EXACT, saves=("gradients",),
    changes="update each parameter in the backward, as soon as its gradient exists, and free that",
    cost="no gradient accumulation, clipping by norm or loss scaling",
    options={"optimizer": OPTIMIZER},
    required=("optimizer",), training_only=True, accumulates=False,
    useless_if=NO_OPTIMIZER,
    ladder_order=80, search_order=60, tiers=EXACT_UPDATE_TIERS,
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Create an optimizer for each parameter, to step in the backward; the fix's result is a `BackwardOptimizer`.
    Raises UsageError if no parameter is trained, gradients exist, or `optimizer` returns no torch optimizer."""
    parameters = list_trained_parameters(model, changes.fix)
    refuse_gradients(parameters, changes.fix, type(model).__name__)
    optimizers = [make_optimizer(optimizer, [parameter]) for parameter in parameters]
    hooks = contextlib.ExitStack()
    changes.on_undo(hooks.close)
    for parameter, stepper in zip(parameters, optimizers, strict=True):
        hooks.callback(parameter.register_post_accumulate_grad_hook(partial(_step_and_free, stepper)).remove)
    changes.result(BackwardOptimizer(optimizers))
    changes.note(f"{len(parameters)} parameters are updated in the backward by {type(optimizers[0]).__name__}")


def _step_and_free(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()
    parameter.grad = None


class BackwardOptimizer:
    """Optimizer for the training loop whose `step` and `zero_grad` do nothing, because the backward updates parameters.
    `param_groups` has the groups of all parameters' optimizers, so that a learning-rate scheduler can change them."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers: one or more per parameter."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Do nothing: the backward has updated the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the backward has freed the gradients."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of the parameters' optimizers, in the order of the model's trained parameters."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the list of optimizer states that `state_dict` returned."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
