"""The variables of a program: those of its running functions, and of their modules."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from memprof.watch import liveness
from memprof.watch.frames import read_local_variables
from memprof.watch.program_code import is_program
from memprof.watch.recorder import Recorder

_MAX_PARTS = 64  # items of a container that are checked for running sums
_MAX_SUM_DEPTH = 3  # references from a variable to a sum: `self.meters["loss"].sum`


@dataclass(slots=True)
class HolderName:
    """Name of an object in the program's code: a variable (`losses`), attribute (`Trainer.losses`) or item."""

    text: str
    code: CodeType | None  # code of the function that has the variable
    owner: type | None = None  # class that has the attribute
    is_global: bool = False  # a global, which any function may fill; `code` is of a function in its module
    offset: int | None = None  # of the instruction that `code` runs; None: not a variable of a running function

    @property
    def is_parameter(self) -> bool:
        """Return whether this is a variable of a function that has it, at first, from its caller."""
        if self.code is None or self.owner is not None or self.is_global:
            return False
        num_parameters = self.code.co_argcount + self.code.co_kwonlyargcount
        return self.text.partition("[")[0] in self.code.co_varnames[:num_parameters]


class ProgramVariables:
    """Local variables of the program's running functions, innermost first, and the globals of their modules."""

    def __init__(self, recorder: Recorder) -> None:
        self.names: dict[int, list[HolderName]] = {}  # by the id of the value
        self.num_loader_batches: int | None = None
        # Variables that are tensors, and tensors in attributes and containers of the program.
        self.tensors: list[tuple[HolderName, torch.Tensor]] = []
        self.codes: list[CodeType] = []
        self._globals: list[dict[str, Any]] = []  # of the modules of these functions
        loaders: dict[int, DataLoader[Any]] = {}
        seen_globals: set[int] = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if is_program(code):
                self.codes.append(code)
                values = read_local_variables(frame)
                self.add(values, code, frame.f_lasti)
                if not loaders:
                    loaders = {id(v): v for v in values.values() if _is_loader(v)}
                if not any(namespace is frame.f_globals for namespace in self._globals):
                    self._globals.append(frame.f_globals)
                if code.co_flags & inspect.CO_OPTIMIZED and id(frame.f_globals) not in seen_globals:
                    seen_globals.add(id(frame.f_globals))
                    self.add(dict(frame.f_globals), code, None, is_global=True)
            frame = frame.f_back
        if len(loaders) == 1:
            try:
                self.num_loader_batches = len(next(iter(loaders.values())))
            except (TypeError, NotImplementedError):  # a data set without length
                self.num_loader_batches = None

    def iterate_global_codes(self) -> Iterator[CodeType]:
        """Yield the code of the functions and methods that are defined in the modules of the running functions."""
        for namespace in self._globals:
            for value in list(namespace.values()):
                for part in vars(value).values() if isinstance(value, type) else (value,):
                    if isinstance(part, types.FunctionType) and part.__globals__ is namespace:
                        yield part.__code__

    def may_read(self, name: HolderName) -> bool:
        """Return whether the program may read the value that the variable `name` has now; false for attributes."""
        variable = name.text.partition("[")[0]
        if name.code is None or name.owner is not None:
            return False
        if name.offset is not None and liveness.may_read(name.code, name.offset, variable):
            return True
        is_of_module = name.is_global or not name.code.co_flags & inspect.CO_OPTIMIZED
        return is_of_module and any(liveness.reads_global(code, variable) for code in self.iterate_global_codes())

    def add(self, values: dict[str, Any], code: CodeType, offset: int | None, *, is_global: bool = False) -> None:
        """Add the variables `values` of the function that `code` is of, and that runs at `offset`; `is_global`: those
        of its module."""
        for name, value in values.items():
            kind = type(value)
            if issubclass(kind, (types.ModuleType, types.FunctionType, type, int, float, str, bytes, type(None))):
                continue
            self.names.setdefault(id(value), []).append(HolderName(name, code, None, is_global, offset))
            self.tensors += _iterate_named_tensors(HolderName(name, code, None, False, offset), value, _MAX_SUM_DEPTH)


def _iterate_named_tensors(name: HolderName, value: Any, depth: int) -> Iterator[tuple[HolderName, torch.Tensor]]:
    """Yield (name, tensor) of `value`, called `name`: itself, or in its items and attributes up to `depth` below it."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield name, value
    elif depth == 0:
        return
    elif issubclass(kind, (dict, list, tuple)):
        for key, part in list(value.items() if issubclass(kind, dict) else enumerate(value))[:_MAX_PARTS]:
            if issubclass(type(key), (str, int)):
                item = dataclasses.replace(name, text=f"{name.text}[{key!r}]")
                yield from _iterate_named_tensors(item, part, depth - 1)
        return
    if issubclass(kind, nn.Module):
        yield from _iterate_buffers(name, value)
    if not kind.__module__.startswith(("torch.", "memprof.", "builtins")):
        attributes = read_instance_attributes(value)
        if issubclass(kind, nn.Module):
            attributes.pop("_buffers", None)
        for attribute, part in attributes.items():
            yield from _iterate_named_tensors(HolderName(f"{kind.__name__}.{attribute}", None, kind), part, depth - 1)


def _iterate_buffers(name: HolderName, module: nn.Module) -> Iterator[tuple[HolderName, torch.Tensor]]:
    """Yield (name, buffer) of `module`, called `name`, as an attribute, and of its parts by their paths."""
    for path, part in module.named_modules():
        kind = type(part)
        for attribute, buffer in part.named_buffers(recurse=False):
            yield HolderName(f"{f'{name.text}.{path}' if path else kind.__name__}.{attribute}", None, kind), buffer


def _is_loader(value: Any) -> bool:
    """Return whether `value` is a DataLoader, or a wrapper (of accelerate) that passes isinstance(..., DataLoader)."""
    kind = type(value)
    return issubclass(kind, DataLoader) or ("DataLoader" in kind.__name__ and isinstance(value, DataLoader))


def read_instance_attributes(value: Any) -> dict[str, Any]:
    """Return a copy of the `__dict__` of `value`, without evaluating properties; empty if it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(attributes) if type(attributes) is dict else {}
