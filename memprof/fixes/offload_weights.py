"""Fix cpu-offload-weights: layers are kept in host memory, and copied to the GPU for their forward and backward.

Each layer is one autograd node. It saves the layer's inputs and runs the forward without a graph. Its backward copies
the weights to the GPU again, recomputes the forward, and copies the gradients to the host. So the GPU has the weights
and gradients of one layer at a time, and the optimizer runs in host memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes, ReplacedForward, runs_in
from memprof.fixes.catalog.fix import Fix, Numerics, Tier
from memprof.fixes.optimizers import refuse_gradients
from memprof.torch_private.pytree import tree_flatten, tree_unflatten
from memprof.workload.layers import drop_caches, find_layers


@Fix(
    name="cpu-offload-weights", order=190, numerics=Numerics.EXACT, saves=("parameters", "gradients", "activations"),
    changes="the weights of a layer are on the GPU while it runs, in host memory otherwise",
    cost="the weights cross the bus twice in a step, their gradients once; layers run again in the backward",
    makes_room_first=True,
    conflicts={
        "activation-checkpointing": "it runs the layers again in the backward itself",
        "cpu-offload-activations": "it keeps nothing but the layers' inputs",
        "optimizer-in-backward": "gradients of offloaded weights arrive in host memory after the layer's backward",
    },
    search=110, tiers=(Tier.STREAMED_WEIGHTS,), helps={"gradients": 20, "parameters": 20, "doctor: smaller": 70},
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Move the layers to host memory. Raises UsageError: no layers; layers share parameters or have gradients."""
    layers = find_layers(model, changes.fix)
    counts: Counter[int] = Counter()
    for name, layer in layers:
        if runs_in(layer, _StreamedForward):
            raise changes.already_on(name)
        refuse_gradients(layer.parameters(), changes.fix, None)
        counts.update(map(id, layer.parameters()))
    if counts and max(counts.values()) > 1:
        raise changes.does_not_apply("layers share parameters", model)
    moved = 0
    for _, layer in layers:
        for parameter in layer.parameters():
            changes.on_undo(functools.partial(_move_parameter, parameter, parameter.device))
            parameter.data = parameter.data.to("cpu")
            moved += parameter.numel() * parameter.element_size()
        changes.set_attribute(layer, "forward", _StreamedForward(layer))
    changes.note(f"{len(layers)} layers, {moved:,} bytes of weights, wait in host memory")


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    parameter.data = parameter.data.to(device)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(device)


@contextlib.contextmanager
def _fetch_weights(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: copy a layer's parameters to `device`; at exit, add new gradients to the ones in host memory."""
    parameters = list(layer.parameters())
    host = [(parameter.data, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.to(device, non_blocking=True)
    try:
        yield
    finally:
        for parameter, (data, grad) in zip(parameters, host, strict=True):
            fresh = None if parameter.grad is None else parameter.grad.to(data.device)
            parameter.grad = None
            parameter.data = data
            if grad is not None:
                parameter.grad = grad if fresh is None else grad.add_(fresh)
            elif fresh is not None:
                parameter.grad = fresh


class _StreamedForward(ReplacedForward):
    """The forward of a layer whose weights are copied to the GPU for each run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, torch.Tensor)]
        device = next((t.device for t in tensors if t.is_floating_point()), torch.device("cpu"))
        if not torch.is_grad_enabled():
            with _fetch_weights(self._module, device):
                return self._forward(*args, **kwargs)
        if self._module.training:
            args, kwargs = drop_caches(args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        shape: list[Any] = []
        # Autograd calls the node's backward only if some input requires a gradient.
        anchor = torch.zeros((), device=device, requires_grad=True)
        outputs = _LayerNode.apply(anchor, self._module, self._forward, device, tree, shape, *leaves)
        return tree_unflatten(list(outputs), shape[0])


class _LayerNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Any, layer: nn.Module, forward: Any, device: Any, tree: Any, shape: list[Any], *leaves: Any
    ) -> Any:
        ctx.layer, ctx.forward_fn, ctx.device, ctx.tree = layer, forward, device, tree
        ctx.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*(leaves[place] for place in ctx.places))
        ctx.random = _get_random_state(device)
        args, kwargs = tree_unflatten(list(leaves), tree)
        with _fetch_weights(layer, device):
            outputs, spec = tree_flatten(forward(*args, **kwargs))
        shape.append(spec)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = list(ctx.others)
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors]
        for place, tensor in zip(ctx.places, inputs, strict=True):
            leaves[place] = tensor
        # In evaluation with gradients the forward has filled the KV cache: the second run must not.
        args, kwargs = drop_caches(*tree_unflatten(leaves, ctx.tree))
        with _fetch_weights(ctx.layer, ctx.device), torch.enable_grad():
            current = _get_random_state(ctx.device)
            _set_random_state(ctx.device, ctx.random)
            outputs = tree_flatten(ctx.forward_fn(*args, **kwargs))[0]
            _set_random_state(ctx.device, current)
            pairs = [
                (out, grad)
                for out, grad in zip(outputs, grads, strict=True)
                if isinstance(out, torch.Tensor) and out.requires_grad and grad is not None
            ]
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            del outputs, pairs
        result: list[Any] = [None] * len(leaves)
        for place, tensor in zip(ctx.places, inputs, strict=True):
            result[place] = tensor.grad
        return (None,) * 6 + tuple(result)


def _get_random_state(device: torch.device) -> Any:
    """Return the state of the random number generator, so that dropout drops the same values in both forwards."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
