"""Helpers for fixes that create or change an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Return AdamW for `parameters` at a learning rate of 1e-4, the default optimizer of the fixes."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def list_trained_parameters(model: nn.Module, fix: str) -> list[nn.Parameter]:
    """Return the parameters of `model` that require gradients; raise UsageError, which names `fix`, if none does."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError(f"{fix} does not apply: nothing is trained", value=type(model).__name__)
    return parameters


def refuse_gradients(parameters: Iterable[nn.Parameter], fix: str, value: object, message_end: str = "already") -> None:
    """Raise UsageError if any of `parameters` has a gradient; the message names `fix` and ends with `message_end`."""
    if any(parameter.grad is not None for parameter in parameters):
        hint = "call model.zero_grad() first"
        raise UsageError(f"{fix} does not apply: there are gradients {message_end}", value=value, hint=hint)


def make_optimizer(factory: Any, parameters: list[nn.Parameter]) -> Optimizer:
    """Return `factory(parameters)`; raise UsageError if `factory` is no function, or returns no torch optimizer."""
    optimizer = factory(parameters) if callable(factory) else None
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "optimizer must make a torch optimizer from a list of parameters",
            value=type(factory).__name__ if optimizer is None else type(optimizer).__name__,
            hint="such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
    return optimizer
