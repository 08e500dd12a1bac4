"""Layers of a model, found as ModuleLists and Sequentials whose blocks have the same class."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from memprof.errors import UsageError


def find_layers(model: nn.Module, fix: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each layer: each block of a ModuleList or Sequential whose blocks have the same class.
    Raises UsageError, which names `fix`, if the model has none."""
    layers: list[tuple[str, nn.Module]] = []
    list_names: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(list_name + ".") for list_name in list_names):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            classes = {type(child) for child in module}
            if len(classes) == 1 and any(True for child in module for _ in child.parameters()):
                list_names.append(name)
                layers += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    if not layers:
        raise UsageError(
            f"{fix} does not apply: the model has no list of layers",
            value=type(model).__name__,
            hint="layers are sought in nn.ModuleList and nn.Sequential of two or more blocks of one class",
        )
    return layers


_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def drop_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's `args` and `kwargs` with None in place of KV caches, which a recomputed layer would fill twice.
    A cache is recognized by its parameter name, or by its method `get_seq_length`."""
    args = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
    kwargs = {
        name: None if name in _CACHES or hasattr(value, "get_seq_length") else value for name, value in kwargs.items()
    }
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def find_modules(model: nn.Module, patterns: str, fix: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of all modules whose full name, or its last part, matches one of `patterns` (with commas).
    Raises UsageError, which names `fix`, if a pattern matches no module, or a matching module contains another."""
    matched: dict[str, nn.Module] = {}
    for pattern in (pattern.strip() for pattern in patterns.split(",")):
        matches = {
            name: module
            for name, module in model.named_modules()
            if name and (fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.rpartition(".")[2], pattern))
        }
        if not matches:
            names = [name for name, _ in model.named_modules() if name]
            hint = f"the model's are named like {names[-1]!r}; * stands for anything" if names else None
            raise UsageError(f"{fix}: a pattern names no module", value=repr(pattern), hint=hint)
        matched.update(matches)
    for name in matched:
        outer = next((candidate for candidate in matched if name.startswith(candidate + ".")), None)
        if outer is not None:
            raise UsageError(f"{fix}: one module is inside another", value=f"{name} in {outer}", hint="name one")
    return list(matched.items())
