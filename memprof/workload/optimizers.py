"""Optimizers by the names of `--optimizer`: torch's, and those of bitsandbytes and torchao with quantized state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.spec import TargetSpec
from memprof.workload.quantization import import_required

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
}
_LIBRARY_OPTIMIZERS = {
    "adamw-8bit": ("bitsandbytes", "AdamW8bit"),
    "paged-adamw-8bit": ("bitsandbytes", "PagedAdamW8bit"),
    "torchao-adamw-8bit": ("torchao", "AdamW8bit"),
    "torchao-adamw-4bit": ("torchao", "AdamW4bit"),
}
_IMPLEMENTATIONS: dict[str | None, dict[str, bool]] = {
    None: {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


def require_optimizer(name: str) -> Callable[..., Optimizer] | None:
    """Return the constructor of the optimizer `name`, None for "none"; raise UsageError if its library is missing."""
    if name in _LIBRARY_OPTIMIZERS:
        package, kind = _LIBRARY_OPTIMIZERS[name]
        return getattr(import_required(f"{package}.optim"), kind)
    return _OPTIMIZERS.get(name)


def make_optimizer(parameters: list[nn.Parameter], spec: TargetSpec) -> Optimizer | None:
    """Return a new optimizer of `parameters` as `spec` describes; None if `spec.optimizer` is "none"."""
    make = require_optimizer(spec.optimizer)
    return None if make is None else make(parameters, lr=_LEARNING_RATE, **_IMPLEMENTATIONS[spec.optimizer_impl])
