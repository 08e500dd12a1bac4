"""Search for the layers of a model: its long lists of blocks of one class."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from memprof.errors import UsageError


def find_layers(model: nn.Module, fix: str) -> list[tuple[str, nn.Module]]:
    """Return name and module of each layer (of lists of blocks of one class); raise UsageError if there is none."""
    found: list[tuple[str, nn.Module]] = []
    list_names: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer + ".") for outer in list_names):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            kinds = {type(child) for child in module}
            if len(kinds) == 1 and any(True for child in module for _ in child.parameters()):
                list_names.append(name)
                found += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    if not found:
        raise UsageError(
            f"{fix} does not apply: the model has no list of layers",
            value=type(model).__name__,
            hint="layers are sought in nn.ModuleList and nn.Sequential of two or more blocks of one class",
        )
    return found


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def drop_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer without the key-value cache, which a layer that runs twice would fill twice.

    A cache is recognized by its parameter name, or by its method `get_seq_length`.
    """
    args = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
    kwargs = {
        name: None if name in _CACHES or hasattr(value, "get_seq_length") else value for name, value in kwargs.items()
    }
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def find_modules(model: nn.Module, patterns: str, fix: str) -> list[tuple[str, nn.Module]]:
    """Return name and module for all modules that `patterns` (with commas) match, by full name or its last part.

    Raises UsageError if a pattern matches no module, or one module is inside another.
    """
    found: dict[str, nn.Module] = {}
    for pattern in (part.strip() for part in patterns.split(",")):
        matches = {
            name: module
            for name, module in model.named_modules()
            if name and (fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.rpartition(".")[2], pattern))
        }
        if not matches:
            names = [name for name, _ in model.named_modules() if name]
            hint = f"the model's are named like {names[-1]!r}; * stands for anything" if names else None
            raise UsageError(f"{fix}: a pattern names no module", value=repr(pattern), hint=hint)
        found.update(matches)
    for name in found:
        outer = next((other for other in found if name.startswith(other + ".")), None)
        if outer is not None:
            raise UsageError(f"{fix}: one module is inside another", value=f"{name} in {outer}", hint="name one")
    return list(found.items())
