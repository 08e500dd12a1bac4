"""The remedies that a spec names, switched on in the model that a workload has built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError
from memprof.remedies.applied import apply
from memprof.remedies.fixes import options_of, parse_fixes
from memprof.spec import TargetSpec
from memprof.workload.layers import find_layers


def switch_on(
    model: nn.Module,
    spec: TargetSpec,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer | None],
    device: str = "cuda",
    place: Callable[[nn.Module], object] | None = None,
) -> Any:
    """Apply `spec.fixes` to `model`, in host memory, and move it to `device`, or where `place` puts it; return the
    optimizer, if a remedy brings it. Raises UsageError: a remedy does not apply to this model."""
    fixes = parse_fixes(",".join(spec.fixes))
    names = [fix.remedy.name for fix in fixes]
    options = options_of(fixes)
    if any("optimizer" in fix.remedy.options for fix in fixes):
        options["optimizer"] = make_optimizer
    first = next((fix.remedy.name for fix in fixes if fix.remedy.makes_room_first), None)
    if first is not None and place is not None:
        raise UsageError(
            f"{first} beside --parallel is not here", value=str(spec.parallel), hint="--fix cpu-offload-optimizer is"
        )
    if first is not None:
        # Before the move: the layers are never on the card as a whole.
        applied = apply(model, names, undoable=False, **options)
        _move_but_layers(model, device, first)
    else:
        model.to(device) if place is None else place(model)
        applied = apply(model, names, undoable=False, **options)
    return next((result for result in applied.results.values() if hasattr(result, "param_groups")), None)


def _move_but_layers(model: nn.Module, device: str, remedy: str) -> None:
    """Everything to `device` except the layers' parameters."""
    layers = [layer for _, layer in find_layers(model, remedy)]
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
        else:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
