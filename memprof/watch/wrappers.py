"""Inner tensors of tensors without own storage: wrappers of torch.func (`vmap`, `grad`), DTensors (which contain this
rank's shard), sparse tensors (indices and values) and quantized tensors."""

from __future__ import annotations

import torch

from memprof.torch_private import autograd, dispatch

# Class of a tensor of torch.distributed -> the attribute with this rank's shard.
_LOCAL_ATTRIBUTES = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has a storage of its own; false for wrapper subclasses with a `__torch_dispatch__`."""
    return type(tensor).__torch_dispatch__ is dispatch.disabled_torch_dispatch_impl and not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a wrapper made by a torch.func transformation such as `vmap` or `grad`."""
    return bool(autograd.is_functorch_wrapped_tensor(tensor))


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the innermost tensor inside torch.func wrappers and torch.distributed tensors (DTensor); `tensor` itself
    if it is neither."""
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
    """Return the inner tensors of a quantized `tensor`, without the storage of `tensor` itself; [] if not quantized.

    bitsandbytes parameters have the scales in attributes: `quant_state` (with an inner `state2` if the scales are
    quantized too) or `SCB`. Wrapper subclasses, such as torchao's, list their tensors in `__tensor_flatten__`.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [part for part in parts if isinstance(part, torch.Tensor)]  # a DTensor names its device mesh too
    parts = []
    quant_state = getattr(tensor, "quant_state", None)
    while quant_state is not None:
        parts += [value for value in vars(quant_state).values() if isinstance(value, torch.Tensor)]
        quant_state = vars(quant_state).get("state2")
    scales = getattr(tensor, "SCB", None)
    return [*parts, scales] if isinstance(scales, torch.Tensor) else parts
