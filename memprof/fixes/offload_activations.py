"""Fix cpu-offload-activations: tensors saved for the backward are kept in pinned host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes, ReplacedForward, check_at_least, has_forward
from memprof.fixes.catalog.fix import NOT_STREAMED_TIERS, Fix, Numerics
from memprof.fixes.compiled import Compiled
from memprof.workload.layers import find_layers

MIN_BYTES = 1 << 20  # smaller tensors stay: a copy costs more time than they save memory


@Fix(
    name="cpu-offload-activations", order=170, numerics=Numerics.EXACT, saves=("activations",),
    changes="move what layers save for the backward to host memory",
    cost="every such byte crosses the bus twice in a step",
    options={"min_bytes": "tensors below this stay on the GPU; 1 MiB if not given"},
    main_option="min_bytes", training_only=True, ladder_order=130, script_order=70, search_order=100,
    tiers=NOT_STREAMED_TIERS, moves_to_host=True,
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, min_bytes: int = MIN_BYTES) -> None:
    """Replace the layers' forwards; raise UsageError without layers, if on already, or if `min_bytes` is negative."""
    check_at_least(0, "min_bytes", min_bytes)
    layers = find_layers(model, changes.fix)
    for name, module in layers:
        if has_forward(module, Offloaded):
            raise changes.already_on(name)
        changes.set_attribute(module, "forward", Offloaded(module, min_bytes))
    changes.note(f"saved tensors of {len(layers)} layers wait in host memory: {layers[0][0]} to {layers[-1][0]}")


class Offloaded(ReplacedForward):
    """Replaced forward of a layer, under hooks that move tensors saved by autograd to host memory.

    Parameters and views of parameters stay on the GPU (`torch.autograd.graph.save_on_cpu` copies them too). A tensor
    that several operators save is copied for each operator.
    """

    def __init__(self, module: nn.Module, min_bytes: int = MIN_BYTES) -> None:
        super().__init__(module)
        self._min_bytes = min_bytes
        self._preserve_strides = has_forward(module, Compiled)  # compiled code asserts strides

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward, and move the tensors that autograd saves to host memory."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            return self._forward(*args, **kwargs)

    def _stays_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() < self._min_bytes

    def _pack(self, tensor: torch.Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor
        if isinstance(base, nn.Parameter) or self._stays_on_gpu(tensor):
            return tensor
        host_copy = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda)
        host_copy.copy_(tensor)
        return tensor.device, host_copy, tensor.stride() if self._preserve_strides else host_copy.stride()


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host_copy, strides = packed
    if strides == host_copy.stride():
        result: torch.Tensor = host_copy.to(device, non_blocking=True)
    else:
        result = torch.empty_strided(host_copy.size(), strides, dtype=host_copy.dtype, device=device)
        result.copy_(host_copy, non_blocking=True)
    return result
