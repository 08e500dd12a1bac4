"""Optimizers, as torch has them, over what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.spec import TargetSpec

_LEARNING_RATE = 1e-4
_MOMENTUM = 0.9


def _sgd_with_momentum(parameters: list[nn.Parameter], **options: Any) -> Optimizer:
    return torch.optim.SGD(parameters, momentum=_MOMENTUM, **options)


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": _sgd_with_momentum,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
_IMPLEMENTATIONS: dict[str | None, dict[str, bool]] = {
    None: {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


def make_optimizer(spec: TargetSpec, model: nn.Module) -> Optimizer | None:
    """The optimizer that `spec` asks for, over the parameters of `model` that are not frozen; None for "none"."""
    if spec.optimizer == "none":
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _OPTIMIZERS[spec.optimizer](parameters, lr=_LEARNING_RATE, **_IMPLEMENTATIONS[spec.optimizer_impl])
