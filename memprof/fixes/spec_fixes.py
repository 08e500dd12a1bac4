"""The fixes in `TargetSpec.fixes`, applied to the model that a workload has built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError
from memprof.fixes.applied import apply
from memprof.fixes.chosen import apply_options, parse_fixes
from memprof.spec import TargetSpec
from memprof.workload.layers import find_layers


def apply_fixes(
    model: nn.Module,
    spec: TargetSpec,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer | None],
    device: str = "cuda",
    place: Callable[[nn.Module], object] | None = None,
) -> Any:
    """Apply `spec.fixes` to `model`, and move `model` from host memory to `device`, or call `place(model)` instead;
    return the optimizer, if a fix makes one. Raises UsageError: a fix does not apply to this model."""
    fixes = parse_fixes(",".join(spec.fixes))
    names = [chosen.fix.name for chosen in fixes]
    options = apply_options(fixes)
    if any("optimizer" in chosen.fix.options for chosen in fixes):
        options["optimizer"] = make_optimizer
    first = next((chosen.fix.name for chosen in fixes if chosen.fix.makes_room_first), None)
    if first is not None and place is not None:
        raise UsageError(
            f"{first} beside --parallel is not here", value=str(spec.parallel), hint="--fix cpu-offload-optimizer is"
        )
    if first is not None:
        # Applied before the move, since the GPU need not have room for all layers.
        applied = apply(model, names, undoable=False, **options)
        _move_except_layers(model, device, first)
    else:
        model.to(device) if place is None else place(model)
        applied = apply(model, names, undoable=False, **options)
    return next((result for result in applied.results.values() if hasattr(result, "param_groups")), None)


def _move_except_layers(model: nn.Module, device: str, fix: str) -> None:
    """Move everything to `device` except the layers' parameters."""
    layers = [layer for _, layer in find_layers(model, fix)]
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in in_layers:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
        else:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
