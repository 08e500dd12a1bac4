"""The remedies that a spec names, switched on in the model that a workload has built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memprof.remedies.applied import apply
from memprof.remedies.fixes import Fix, options_of
from memprof.remedies.layers import find_layers
from memprof.remedy_catalog import REMEDIES
from memprof.spec import TargetSpec

MAKE_OPTIMIZERS = ("optimizer-in-backward", "cpu-offload-optimizer", "8-bit-optimizer")
"""Remedies whose result is the optimizer of the run."""
_TAKE_FACTORIES = ("optimizer-in-backward", "cpu-offload-optimizer")


def switch_on(
    model: nn.Module,
    spec: TargetSpec,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer | None],
    device: str = "cuda",
) -> Any:
    """Apply `spec.fixes` to `model`, which is in host memory, and move it to `device`.

    Returns:
        The optimizer, if a remedy brings it.

    Raises:
        UsageError: a remedy does not apply to this model.
    """
    fixes = [Fix(REMEDIES[name], value if equals else None) for name, equals, value in map(_split, spec.fixes)]
    names = [fix.remedy.name for fix in fixes]
    options = options_of(fixes)
    if any(name in names for name in _TAKE_FACTORIES):
        options["optimizer"] = make_optimizer
    if "cpu-offload-weights" in names:
        # Before the move: the layers are never on the card as a whole.
        applied = apply(model, names, undoable=False, **options)
        _move_but_layers(model, device)
    else:
        model.to(device)
        applied = apply(model, names, undoable=False, **options)
    return next((applied.results[name] for name in MAKE_OPTIMIZERS if name in applied.results), None)


def _split(fix: str) -> tuple[str, str, str]:
    return fix.partition("=")


def _move_but_layers(model: nn.Module, device: str) -> None:
    """Everything to `device` except the layers' parameters."""
    layers = [layer for _, layer in find_layers(model, "cpu-offload-weights")]
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
        else:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
