"""The fixes in `TargetSpec.fixes`, applied to the model that a workload has built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError
from memprof.fixes.applied import apply
from memprof.fixes.chosen import make_apply_options, parse_fixes
from memprof.spec import TargetSpec
from memprof.workload.layers import find_layers


def apply_fixes(
    model: nn.Module,
    spec: TargetSpec,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer | None],
    device: str = "cuda",
    place_model: Callable[[nn.Module], object] | None = None,
) -> Any:
    """Apply `spec.fixes` to `model`, and move it from host memory to `device`, or call `place_model(model)` instead.
    Returns the optimizer if a fix creates one, else None. Raises UsageError if a fix does not apply to this model."""
    fixes = parse_fixes(",".join(spec.fixes))
    names = [chosen_fix.fix.name for chosen_fix in fixes]
    options = make_apply_options(fixes)
    if any("optimizer" in chosen_fix.fix.options for chosen_fix in fixes):
        options["optimizer"] = make_optimizer
    name = next((chosen_fix.fix.name for chosen_fix in fixes if chosen_fix.fix.before_move), None)
    if name is not None and place_model is not None:
        raise UsageError(
            f"{name} beside --parallel is not here", value=str(spec.parallel), hint="--fix cpu-offload-optimizer is"
        )
    if name is not None:
        # Applied before the move, since the GPU need not have room for all layers.
        applied = apply(model, names, undoable=False, **options)
        _move_except_layers(model, device, name)
    else:
        model.to(device) if place_model is None else place_model(model)
        applied = apply(model, names, undoable=False, **options)
    return next((result for result in applied.results.values() if hasattr(result, "param_groups")), None)


def _move_except_layers(model: nn.Module, device: str, fix: str) -> None:
    """Move all parameters and buffers of `model` to `device`, except the layers' parameters."""
    layers = [layer for _, layer in find_layers(model, fix)]
    layer_modules = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in layer_modules:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
        else:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
