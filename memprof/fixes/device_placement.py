"""Fix device-placement: tensors that a module holds or creates are on the device of the module's parameters.

A tensor is on the wrong device if `model.to(device)` does not move it (a module's plain attribute, list or
dictionary), or if a forward creates it without naming a device. Before each forward of the model the fix moves the
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
from memprof.fixes.catalog.fix import NOT_STREAMED_TIERS, Fix, Numerics

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 3  # levels of nested containers that are searched
_CONTAINERS = (dict, list, tuple)


@Fix(
    name="device-placement", order=20, numerics=Numerics.EXACT, saves=(),
    changes="move tensors that modules hold to the device of their parameters, and make new ones there",
    cost="what is moved takes bytes on the GPU; so does what a forward makes without naming a device",
    options={"keep_on_host": "patterns of names of tensors that stay where they are; * stands for anything"},
    conflicts={"cpu-offload-weights": "its layers are in host memory on purpose"},
    ladder_order=10, search_order=10, tiers=NOT_STREAMED_TIERS, helps={"device-mismatch": 10},
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, keep_on_host: str | None = None) -> None:
    """Move the tensors that modules hold to the device of their module, now and before each forward.
    Raises UsageError if the model has no parameters or buffers."""
    if _find_device(model) is None:
        raise changes.does_not_apply("the model has no parameters or buffers", model)
    on_host = tuple(part.strip() for part in keep_on_host.split(",")) if keep_on_host else ()
    moved = move_stray_tensors(model, on_host, changes)
    # The forward of torch's modules makes no tensor on a wrong device.
    modules = [m for m in model.modules() if m is model or type(m).__module__.partition(".")[0] != "torch"]
    for module in modules:
        changes.set_attribute(module, "forward", _PlacedForward(module, on_host, module is model))
    names = f": {', '.join(moved)}" if moved else ""
    changes.note(
        f"{len(moved)} tensors were moved{names}; what {len(modules)} modules make has the device of their own"
    )


def move_stray_tensors(model: nn.Module, on_host: tuple[str, ...] = (), changes: Changes | None = None) -> list[str]:
    """Move tensors that modules hold on another device than their own, except `on_host` names; return the moved names.

    A module's device is its parameters' device; without parameters, the only device of the model's parameters, or else
    the device of the module's buffers.
    """
    moved_names: list[str] = []
    devices = {parameter.device for parameter in model.parameters()}
    model_device = devices.pop() if len(devices) == 1 else None
    for path, module in model.named_modules():
        parameter = next(module.parameters(), None)
        device = parameter.device if parameter is not None else model_device or _find_device(module)
        if device is None or device.type == "meta":
            continue
        for name, tensor, set_tensor in _iter_held_tensors(module):
            if tensor.device == device or not tensor.dim():  # operators take a scalar in host memory on any device
                continue
            full_name = f"{path}.{name}" if path else name
            if not any(fnmatch.fnmatch(full_name, pattern) for pattern in on_host):
                if changes is not None:
                    changes.on_undo(functools.partial(set_tensor, tensor))
                set_tensor(tensor.to(device))
                moved_names.append(full_name)
    return moved_names


class _PlacedForward(ReplacedForward):
    """Replaced forward of a module, with the module's device as torch's default; the model's first moves tensors."""

    def __init__(self, module: nn.Module, on_host: tuple[str, ...], is_model: bool) -> None:
        super().__init__(module)
        self._on_host = on_host
        self._is_model = is_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_model:
            move_stray_tensors(self._module, self._on_host)
        device = _find_device(self._module)
        # A nested default device slows every operator: modules on the same device need only one.
        if device is None or device == torch.get_default_device():
            return self._forward(*args, **kwargs)
        with torch.device(device):
            return self._forward(*args, **kwargs)


def _find_device(module: nn.Module) -> torch.device | None:
    """Return the device of a module's first parameter, or else of its first buffer; None if it has neither."""
    for parameter in module.parameters():
        return parameter.device
    return next((buffer.device for buffer in module.buffers()), None)


def _iter_held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield (name, tensor, function that replaces it) for each tensor that `module` itself holds, except parameters."""
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            yield name, buffer, functools.partial(module._buffers.__setitem__, name)
    for name, value in list(vars(module).items()):
        if name not in _MODULE_DICTS:
            yield from _iter_nested(name, value, functools.partial(vars(module).__setitem__, name))


def _iter_nested(
    name: str, value: Any, set_value: Callable[[Any], None], depth: int = 0
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield (name, tensor, function that replaces it) for the tensors in `value`, a tensor or nested container."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield name, value, set_value
    elif isinstance(value, (list, dict)):
        items = list(enumerate(value)) if isinstance(value, list) else list(value.items())
        for key, item in items:
            if isinstance(item, (torch.Tensor, *_CONTAINERS)):
                yield from _iter_nested(f"{name}[{key!r}]", item, functools.partial(value.__setitem__, key), depth + 1)
    elif isinstance(value, tuple) and any(isinstance(item, (torch.Tensor, *_CONTAINERS)) for item in value):
        items = list(value)

        def set_item(index: int, item: Any) -> None:
            items[index] = item
            set_value(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))

        for index, item in enumerate(value):
            if isinstance(item, (torch.Tensor, *_CONTAINERS)):
                yield from _iter_nested(f"{name}[{index}]", item, functools.partial(set_item, index), depth + 1)
