"""The wrappers of torch.func: inside `vmap` or `grad` a module is given tensors around others, without storages."""

from __future__ import annotations

import torch

_functorch = torch._C._functorch


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transformation of torch.func has it wrapped."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of torch.func, of which there is one for each transformation; else `tensor`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
