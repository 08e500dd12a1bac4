"""Helpers for fixes that make or change an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Return the default optimizer: AdamW at a learning rate of 1e-4."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def trained_parameters(model: nn.Module, fix: str) -> list[nn.Parameter]:
    """Return the trained parameters of `model`. Raises UsageError: the model has no trained parameter."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError(f"{fix} does not apply: nothing is trained", value=type(model).__name__)
    return parameters


def refuse_gradients(parameters: Iterable[nn.Parameter], fix: str, value: object, which: str = "already") -> None:
    """Raise UsageError if any of `parameters` has a gradient; `which` ends the sentence of the message."""
    if any(parameter.grad is not None for parameter in parameters):
        hint = "call model.zero_grad() first"
        raise UsageError(f"{fix} does not apply: there are gradients {which}", value=value, hint=hint)


def make_optimizer(factory: Any, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer that `factory` makes of `parameters`. Raises UsageError: `factory` makes no optimizer."""
    made = factory(parameters) if callable(factory) else None
    if not isinstance(made, Optimizer):
        raise UsageError(
            "optimizer must make a torch optimizer from a list of parameters",
            value=type(factory).__name__ if made is None else type(made).__name__,
            hint="such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
    return made
