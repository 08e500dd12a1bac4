"""Hooks that a program registers on one module again and again: each call of the module runs all of them."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from memprof.watch.program_code import is_program
from memprof.watch.source_lines import find_line, read_line

MIN_HOOKS = 3  # with the same code on one module: two may be for training and evaluation

_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PiledHook(NamedTuple):
    """A function, a method or the class of an object that is called as one, which hooks run."""

    code: CodeType
    owner: type | None  # class of the object that is called, or whose method is; None: a function
    is_object: bool  # whether the object is called, and not its method

    @property
    def name(self) -> str:
        """Return the qualified name of the function or method, or of the object's class."""
        return self.owner.__qualname__ if self.is_object and self.owner is not None else self.code.co_qualname


def find_piled_hook(modules: Iterable[nn.Module], owner: type | None = None) -> PiledHook | None:
    """Return the hook that is registered most often on one of the `modules`, at least MIN_HOOKS times; None if there is
    none. `owner`: only hooks that are objects of this class, or methods of such."""
    counts = Counter[tuple[int, PiledHook]]()
    for module in modules:
        for registry in _REGISTRIES:
            hooks = _iterate_hooks(vars(module).get(registry, {}))
            counts.update((id(module), hook) for hook in hooks if owner is None or hook.owner is owner)
    (_, hook), count = max(counts.items(), key=lambda item: item[1], default=((0, None), 0))
    return hook if count >= MIN_HOOKS else None


def find_registering_line(hook: PiledHook, codes: Iterable[CodeType]) -> str | None:
    """Return `file:line function` of the line in `codes` that registers the hook, an object by what it is assigned to;
    None if there is no such line."""
    codes = list(codes)
    names = {hook.code.co_name}
    if hook.is_object:
        kind = hook.name.rpartition(".")[2]
        made, names = rf"(\w+)\s*=\s*(?:\w+\.)*{kind}\(", {kind}
        lines = (find_line(code, made) for code in codes)
        names.update(match[1] for line in lines if line is not None and (match := re.search(made, read_line(line))))
    called = "|".join(sorted(names))
    lines = (find_line(code, rf"register_\w*hook\(.*(?<!\w)(?:{called})(?!\w)") for code in codes)
    return next((line for line in lines if line is not None), None)


def _iterate_hooks(hooks: Mapping[int, Any]) -> Iterator[PiledHook]:
    for hook in hooks.values():
        owner, function = None, hook
        if isinstance(hook, MethodType):
            owner, function = type(hook.__self__), hook.__func__
        elif not isinstance(hook, FunctionType):
            owner, function = type(hook), type(hook).__call__
        function = inspect.unwrap(function)
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and is_program(function.__code__):
            yield PiledHook(function.__code__, owner, owner is not None and not isinstance(hook, MethodType))
