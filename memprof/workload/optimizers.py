"""Optimizers over what is trained: torch's own, and those of bitsandbytes and torchao whose state is quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.spec import BITSANDBYTES_OPTIMIZERS, TORCHAO_OPTIMIZERS, TargetSpec
from memprof.workload.quantization import require_bitsandbytes, require_torchao

_LEARNING_RATE = 1e-4
_MOMENTUM = 0.9


def _sgd_with_momentum(parameters: list[nn.Parameter], **options: Any) -> Optimizer:
    return torch.optim.SGD(parameters, momentum=_MOMENTUM, **options)


def _of_bitsandbytes(name: str) -> Callable[..., Optimizer]:
    def make(parameters: list[nn.Parameter], **options: Any) -> Optimizer:
        return getattr(require_bitsandbytes(), name)(parameters, **options)  # type: ignore[no-any-return]

    return make


def _of_torchao(name: str) -> Callable[..., Optimizer]:
    def make(parameters: list[nn.Parameter], **options: Any) -> Optimizer:
        return getattr(require_torchao(), name)(parameters, **options)  # type: ignore[no-any-return]

    return make


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": _sgd_with_momentum,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamw-8bit": _of_bitsandbytes("AdamW8bit"),
    "paged-adamw-8bit": _of_bitsandbytes("PagedAdamW8bit"),
    "torchao-adamw-8bit": _of_torchao("AdamW8bit"),
    "torchao-adamw-4bit": _of_torchao("AdamW4bit"),
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
