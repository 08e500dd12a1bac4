"""cpu-offload-activations: what layers keep for the backward is copied to pinned host memory, and back when needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from memprof.remedies.implementation.applied import Changes
from memprof.remedies.implementation.layers import find_layers

MIN_BYTES = 1 << 20
"""Smaller tensors stay: a copy costs more time than they save memory."""


def install(model: nn.Module, changes: Changes) -> None:
    """Switch it on.

    Raises:
        UsageError: the model has no layers.
    """
    layers = find_layers(model, changes.remedy)
    for _, module in layers:
        changes.set_attribute(module, "forward", _Offloaded(module.forward))
    changes.note(f"saved tensors of {len(layers)} layers wait in host memory: {layers[0][0]} to {layers[-1][0]}")


class _Offloaded:
    """The forward of a layer, under hooks that move what autograd saves.

    Parameters, and views of them, stay: they are on the card anyway. (`torch.autograd.graph.save_on_cpu` copies those
    too, once for every layer.) A tensor that several operators save is copied once.
    """

    def __init__(self, forward: Any) -> None:
        functools.update_wrapper(self, forward, updated=())
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return self._forward(*args, **kwargs)


def _pack(tensor: torch.Tensor) -> Any:
    base = tensor._base if tensor._base is not None else tensor
    if isinstance(base, nn.Parameter) or not tensor.is_cuda or tensor.numel() * tensor.element_size() < MIN_BYTES:
        return tensor
    host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True)
    host.copy_(tensor)
    return tensor.device, host


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    result: torch.Tensor = host.to(device, non_blocking=True)
    return result
