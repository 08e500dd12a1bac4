"""Hooks that a program registers on one module again and again: each call of the module runs all of them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from memprof.watch.program_code import is_program
from memprof.watch.source_lines import find_line

MIN_HOOKS = 3  # with the same code on one module: two may be for training and evaluation

_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_piled_hook(module: nn.Module) -> CodeType | None:
    """Return the code of the hook that is registered most often on one of the modules in `module`, at least MIN_HOOKS
    times; None if there is none."""
    counts = Counter[tuple[int, CodeType]]()
    for part in module.modules():
        counts.update((id(part), code) for registry in _REGISTRIES for code in _iterate_codes(getattr(part, registry)))
    (_, code), count = max(counts.items(), key=lambda item: item[1], default=((0, None), 0))
    return code if count >= MIN_HOOKS else None


def find_registering_line(hook: CodeType, codes: Iterable[CodeType]) -> str | None:
    """Return `file:line function` of the line in `codes` that registers the hook; None if there is no such line."""
    lines = (find_line(code, rf"register_\w*hook\(.*(?<!\w){hook.co_name}(?!\w)") for code in codes)
    return next((line for line in lines if line is not None), None)


def _iterate_codes(hooks: dict[int, Any]) -> Iterator[CodeType]:
    for hook in hooks.values():
        function = inspect.unwrap(getattr(hook, "__func__", hook))
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and is_program(function.__code__):
            yield function.__code__
