"""Optimizers over what is trained: torch's own, and those of bitsandbytes and torchao whose state is quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.spec import BITSANDBYTES_OPTIMIZERS, TORCHAO_OPTIMIZERS, TargetSpec
from memprof.workload.quantization import require_bitsandbytes, require_torchao

_LEARNING_RATE = 1e-4
_MOMENTUM = 0.9


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": functools.partial(torch.optim.SGD, momentum=_MOMENTUM),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    # Their libraries are asked for when they are made.
    "adamw-8bit": lambda *args, **options: require_bitsandbytes().AdamW8bit(*args, **options),
    "paged-adamw-8bit": lambda *args, **options: require_bitsandbytes().PagedAdamW8bit(*args, **options),
    "torchao-adamw-8bit": lambda *args, **options: require_torchao().AdamW8bit(*args, **options),
    "torchao-adamw-4bit": lambda *args, **options: require_torchao().AdamW4bit(*args, **options),
}
_IMPLEMENTATIONS: dict[str | None, dict[str, bool]] = {
    None: {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


def require_optimizer(name: str) -> None:
    """Import the library of the optimizer `name`, before a virtual GPU is there to watch.

    Raises:
        UsageError: it is not installed.
    """
    if name in BITSANDBYTES_OPTIMIZERS:
        require_bitsandbytes()
    elif name in TORCHAO_OPTIMIZERS:
        require_torchao()


def make_optimizer(spec: TargetSpec, model: nn.Module) -> Optimizer | None:
    """The optimizer that `spec` asks for, over the parameters of `model` that are not frozen; None for "none"."""
    return optimizer_over([parameter for parameter in model.parameters() if parameter.requires_grad], spec)


def optimizer_over(parameters: list[nn.Parameter], spec: TargetSpec) -> Optimizer | None:
    """The same over these parameters."""
    if spec.optimizer == "none":
        return None
    return _OPTIMIZERS[spec.optimizer](parameters, lr=_LEARNING_RATE, **_IMPLEMENTATIONS[spec.optimizer_impl])
