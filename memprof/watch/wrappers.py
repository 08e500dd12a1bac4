"""Tensors without storages of their own: inside `vmap` or `grad` of torch.func a module gets wrapped tensors, a DTensor
has this rank's shard inside, and a sparse tensor consists of indices and values."""

from __future__ import annotations

import torch

from memprof.torch_private import autograd, dispatch

# Class of a tensor of torch.distributed -> the attribute with this rank's shard.
_LOCAL_ATTRIBUTES = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has a storage of its own; also true for subclasses without `__torch_dispatch__`."""
    return type(tensor).__torch_dispatch__ is dispatch.disabled_torch_dispatch_impl and not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a transformation of torch.func has wrapped `tensor`."""
    return bool(autograd.is_functorch_wrapped_tensor(tensor))


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of torch.func (one for each transformation) and of torch.distributed;
    `tensor` itself if there are no wrappers."""
    while autograd.is_functorch_wrapped_tensor(tensor):
        tensor = autograd.get_unwrapped(tensor)
    part = _LOCAL_ATTRIBUTES.get(type(tensor).__name__)
    return tensor if part is None else unwrap(getattr(tensor, part))


def get_sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse tensor of any layout; an empty list for a dense tensor."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def get_quantized_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a quantized tensor besides its own data; an empty list for an ordinary tensor.

    A parameter of bitsandbytes has the scales as attributes (`quant_state`, with an inner `state2` where the scales are
    quantized too, or `SCB`); tensor subclasses that wrap tensors, such as torchao's, list them in `__tensor_flatten__`.
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
