"""Fix cpu-offload-weights: layers are kept in host memory, and copied to the GPU for their forward and backward.

Each layer's forward becomes one node of autograd's graph, which saves the layer's inputs and runs the forward without
gradients. In the backward, the weights are copied again, the forward is repeated, and the gradients are moved to host
memory. So the GPU has the weights and gradients of one layer at a time, and the optimizer steps in host memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes, ReplacedForward, has_forward
from memprof.fixes.catalog.fix import Fix, Numerics, Tier
from memprof.fixes.optimizers import refuse_gradients
from memprof.torch_private.pytree import tree_flatten, tree_unflatten
from memprof.workload.layers import drop_caches, find_layers


@Fix(
    name="cpu-offload-weights", order=190, numerics=Numerics.EXACT, saves=("parameters", "gradients", "activations"),
    changes="keep the weights of a layer in host memory while it does not run",
    in_code='call memprof.apply(model, "cpu-offload-weights") before the model goes to the GPU, which then has the '
    "weights of one layer at a time",
    cost="the weights cross the bus twice in a step, their gradients once; layers run again in the backward",
    before_move=True,
    conflicts={
        "activation-checkpointing": "it runs the layers again in the backward itself",
        "cpu-offload-activations": "it keeps nothing but the layers' inputs",
        "optimizer-in-backward": "gradients of offloaded weights arrive in host memory after the layer's backward",
    },
    search_order=110, tiers=(Tier.STREAMED_WEIGHTS,), helps={"doctor: smaller": 70}, moves_to_host=True,
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Move the layers' weights to host memory, and replace the layers' forwards.
    Raises UsageError if the model has no layers, or layers share parameters or have gradients."""
    layers = find_layers(model, changes.fix)
    counts: Counter[int] = Counter()
    for name, layer in layers:
        if has_forward(layer, _StreamedForward):
            raise changes.already_on(name)
        refuse_gradients(layer.parameters(), changes.fix, None)
        counts.update(map(id, layer.parameters()))
    if counts and max(counts.values()) > 1:
        raise changes.does_not_apply("layers share parameters", model)
    num_bytes = 0
    for _, layer in layers:
        for parameter in layer.parameters():
            changes.on_undo(functools.partial(_move_parameter, parameter, parameter.device))
            parameter.data = parameter.data.to("cpu")
            num_bytes += parameter.numel() * parameter.element_size()
        changes.set_attribute(layer, "forward", _StreamedForward(layer))
    changes.note(f"{len(layers)} layers, {num_bytes:,} bytes of weights, wait in host memory")


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    parameter.data = parameter.data.to(device)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(device)


@contextlib.contextmanager
def _fetch_weights(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: copy a layer's parameters to `device`; at exit, add new gradients to the ones in host memory."""
    parameters = list(layer.parameters())
    host_tensors = [(parameter.data, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.to(device, non_blocking=True)
    try:
        yield
    finally:
        for parameter, (data, grad) in zip(parameters, host_tensors, strict=True):
            new_grad = None if parameter.grad is None else parameter.grad.to(data.device)
            parameter.grad = None
            parameter.data = data
            if grad is not None:
                parameter.grad = grad if new_grad is None else grad.add_(new_grad)
            elif new_grad is not None:
                parameter.grad = new_grad


class _StreamedForward(ReplacedForward):
    """Replaced forward of a layer, for which the layer's weights are copied to the GPU."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        device = next((t.device for t in tensors if t.is_floating_point()), torch.device("cpu"))
        if not torch.is_grad_enabled():
            with _fetch_weights(self._module, device):
                return self._forward(*args, **kwargs)
        if self._module.training:
            args, kwargs = drop_caches(args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        output_specs: list[Any] = []
        # Autograd calls the node's backward only if some input requires a gradient.
        anchor = torch.zeros((), device=device, requires_grad=True)
        outputs = _LayerNode.apply(anchor, self._module, self._forward, device, tree, output_specs, *leaves)
        return tree_unflatten(list(outputs), output_specs[0])


class _LayerNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Any, layer: nn.Module, forward: Any, device: Any, tree: Any, specs: list[Any], *leaves: Any
    ) -> Any:
        ctx.layer, ctx.forward_fn, ctx.device, ctx.tree = layer, forward, device, tree
        ctx.other_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*(leaves[index] for index in ctx.tensor_indices))
        ctx.random = _get_random_state(device)
        args, kwargs = tree_unflatten(list(leaves), tree)
        with _fetch_weights(layer, device):
            outputs, spec = tree_flatten(forward(*args, **kwargs))
        specs.append(spec)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = list(ctx.other_leaves)
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        for index, tensor in zip(ctx.tensor_indices, inputs, strict=True):
            leaves[index] = tensor
        # In evaluation with gradients the forward has filled the KV cache: the second run must not.
        args, kwargs = drop_caches(*tree_unflatten(leaves, ctx.tree))
        with _fetch_weights(ctx.layer, ctx.device), torch.enable_grad():
            random_state = _get_random_state(ctx.device)
            _set_random_state(ctx.device, ctx.random)
            outputs = tree_flatten(ctx.forward_fn(*args, **kwargs))[0]
            _set_random_state(ctx.device, random_state)
            pairs = [
                (output, grad)
                for output, grad in zip(outputs, grads, strict=True)
                if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None
            ]
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
            del outputs, pairs
        gradients: list[Any] = [None] * len(leaves)
        for index, tensor in zip(ctx.tensor_indices, inputs, strict=True):
            gradients[index] = tensor.grad
        return (None,) * 6 + tuple(gradients)


def _get_random_state(device: torch.device) -> Any:
    """Return the random state of `device`, with which dropout drops the same values when the forward is repeated."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
