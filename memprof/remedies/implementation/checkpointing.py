"""activation-checkpointing: layers, every n-th of them, or modules by name keep their inputs and run again."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.errors import UsageError
from memprof.remedies.implementation.applied import Changes
from memprof.remedies.implementation.layers import find_layers, find_modules, without_caches


def install(model: nn.Module, changes: Changes, *, every: int = 1, modules: str | None = None) -> None:
    """Switch it on.

    Raises:
        UsageError: it is on already; there are no layers, or no such modules; `every` is out of range.
    """
    # Its name in transformers today, and before.
    names = [
        name for name in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(type(model), name)
    ]
    if names and getattr(model, names[0]):
        raise UsageError(
            "activation-checkpointing is already on",
            value=type(model).__name__,
            hint="gradient_checkpointing_disable()",
        )
    if modules is not None:
        chosen = find_modules(model, modules, "activation-checkpointing")
    else:
        layers = find_layers(model, "activation-checkpointing")
        if not isinstance(every, int) or isinstance(every, bool) or not 1 <= every <= len(layers):
            raise UsageError("every is out of range", value=repr(every), hint=f"1 to {len(layers)}, the model's layers")
        chosen = layers[every - 1 :: every]
    for _, module in chosen:
        changes.set_attribute(module, "forward", _Checkpointed(module, module.forward))
    changes.note(f"{len(chosen)} modules run again in the backward: {chosen[0][0]} to {chosen[-1][0]}")


class _Checkpointed:
    """The forward of a layer, checkpointed while the model trains; a key-value cache would be filled twice."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        functools.update_wrapper(self, forward, updated=())
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
