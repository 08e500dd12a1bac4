"""Fix device-placement: tensors that a module holds or creates are put on the device of the module's parameters.

A tensor is on the wrong device if `model.to(device)` does not move it (a module's plain attribute, list or
dictionary), or if a forward makes it without naming a device. Before each forward of the model the fix moves the
tensors that modules hold; during a module's forward, torch's default device is the module's device.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes, ReplacedForward
from memprof.fixes.catalog.fix import BUT_STREAMED_WEIGHTS, Fix, Numerics

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 3  # levels of nested containers that are searched
_CONTAINERS = (dict, list, tuple)


@Fix(
    name="device-placement", order=20, numerics=Numerics.EXACT, saves=(),
    changes="tensors that modules hold or make on another device than their parameters' are moved, and made there",
    cost="what is moved takes bytes on the GPU; so does what a forward makes without naming a device",
    options={"keep_on_host": "patterns of names of tensors that stay where they are; * stands for anything"},
    conflicts={"cpu-offload-weights": "its layers are in host memory on purpose"},
    ladder=10, search=10, tiers=BUT_STREAMED_WEIGHTS, helps={"device-mismatch": 10},
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, keep_on_host: str | None = None) -> None:
    """Move stray tensors, and replace the forwards. Raises UsageError: the model has no parameters or buffers."""
    if _find_device(model) is None:
        raise changes.does_not_apply("the model has no parameters or buffers", model)
    kept = tuple(part.strip() for part in keep_on_host.split(",")) if keep_on_host else ()
    moved = move_strays(model, kept, changes)
    # The forward of torch's modules makes no tensor on a wrong device.
    own = [m for m in model.modules() if m is model or type(m).__module__.partition(".")[0] != "torch"]
    for module in own:
        changes.set_attribute(module, "forward", _PlacedForward(module, kept, module is model))
    names = f": {', '.join(moved)}" if moved else ""
    changes.note(f"{len(moved)} tensors were moved{names}; what {len(own)} modules make has the device of their own")


def move_strays(model: nn.Module, kept: tuple[str, ...] = (), changes: Changes | None = None) -> list[str]:
    """Move the tensors that a module of `model` holds on another device than the module's; return their names.

    A module's device is the device of its parameters; without parameters, the model's single device, if the model has
    one, else the device of the module's buffers.
    """
    moved: list[str] = []
    devices = {parameter.device for parameter in model.parameters()}
    model_device = devices.pop() if len(devices) == 1 else None
    for path, module in model.named_modules():
        first = next(module.parameters(), None)
        device = first.device if first is not None else model_device or _find_device(module)
        if device is None or device.type == "meta":
            continue
        for name, tensor, put in _iter_held_tensors(module):
            if tensor.device == device or not tensor.dim():  # operators take a scalar in host memory on any device
                continue
            full_name = f"{path}.{name}" if path else name
            if not any(fnmatch.fnmatch(full_name, pattern) for pattern in kept):
                if changes is not None:
                    changes.on_undo(functools.partial(put, tensor))
                put(tensor.to(device))
                moved.append(full_name)
    return moved


class _PlacedForward(ReplacedForward):
    """The forward of a module under its default device; the whole model's forward first moves stray tensors."""

    def __init__(self, module: nn.Module, kept: tuple[str, ...], is_model: bool) -> None:
        super().__init__(module)
        self._kept = kept
        self._is_model = is_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_model:
            move_strays(self._module, self._kept)
        device = _find_device(self._module)
        # A nested default device slows every operator: modules on the same device need only one.
        if device is None or device == torch.get_default_device():
            return self._forward(*args, **kwargs)
        with torch.device(device):
            return self._forward(*args, **kwargs)


def _find_device(module: nn.Module) -> torch.device | None:
    """Return the device of a module's parameters; without any, of its registered buffers."""
    for parameter in module.parameters():
        return parameter.device
    return next((buffer.device for buffer in module.buffers()), None)


def _iter_held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield name, tensor and setter of every tensor that a module holds, except parameters."""
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            yield name, buffer, functools.partial(module._buffers.__setitem__, name)
    for name, value in list(vars(module).items()):
        if name not in _MODULE_DICTS:
            yield from _iter_nested(name, value, functools.partial(vars(module).__setitem__, name))


def _iter_nested(
    name: str, value: Any, put: Callable[[Any], None], depth: int = 0
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield name, tensor and setter of the tensors in `value`, in nested lists, tuples and dictionaries too."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield name, value, put
    elif isinstance(value, (list, dict)):
        items = list(enumerate(value)) if isinstance(value, list) else list(value.items())
        for key, part in items:
            if isinstance(part, (torch.Tensor, *_CONTAINERS)):
                yield from _iter_nested(f"{name}[{key!r}]", part, functools.partial(value.__setitem__, key), depth + 1)
    elif isinstance(value, tuple) and any(isinstance(part, (torch.Tensor, *_CONTAINERS)) for part in value):
        parts = list(value)

        def put_part(index: int, part: Any) -> None:
            parts[index] = part
            put(type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts))

        for index, part in enumerate(value):
            if isinstance(part, (torch.Tensor, *_CONTAINERS)):
                yield from _iter_nested(f"{name}[{index}]", part, functools.partial(put_part, index), depth + 1)
