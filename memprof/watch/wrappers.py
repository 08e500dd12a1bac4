"""Tensors without storages of their own: inside `vmap` or `grad` of torch.func a module is given tensors around others,
one that is spread over a device mesh has this rank's part inside, and a sparse one is made of indices and values."""

from __future__ import annotations

import torch

from memprof.torch_private import autograd, dispatch

# Class of a tensor of torch.distributed -> the attribute that is this rank's part of it.
_PART = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has a storage of its own, as a subclass has that does not dispatch by itself."""
    return type(tensor).__torch_dispatch__ is dispatch.disabled_torch_dispatch_impl and not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a transformation of torch.func has it wrapped."""
    return bool(autograd.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of torch.func, of which there is one for each transformation, and of
    torch.distributed; else `tensor`."""
    while autograd.is_functorch_wrapped_tensor(tensor):
        tensor = autograd.get_unwrapped(tensor)
    part = _PART.get(type(tensor).__name__)
    return tensor if part is None else unwrapped(getattr(tensor, part))


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return indices and then values of a sparse tensor of any layout; nothing of another."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def parts_of_quantized(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a quantized one consists of beside its own data; none for an ordinary tensor.

    A parameter of bitsandbytes has its scales as attributes (`quant_state`, with another inside when they are quantized
    in turn, or `SCB`); tensors that wrap others, as torchao's do, name them.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        found = [getattr(tensor, name) for name in names]
        return [part for part in found if isinstance(part, torch.Tensor)]  # a DTensor names its device mesh too
    found = []
    holder = getattr(tensor, "quant_state", None)
    while holder is not None:
        found += [value for value in vars(holder).values() if isinstance(value, torch.Tensor)]
        holder = vars(holder).get("state2")
    scales = getattr(tensor, "SCB", None)
    return [*found, scales] if isinstance(scales, torch.Tensor) else found
