"""Search for the reference cycle that keeps tensors alive which no variable or container of the program has.

Python's garbage collector does not see all of these cycles: it cannot look into an autograd graph. Here a tensor refers
to what its graph keeps: the nodes of custom Functions, with what their `ctx` has, and the leaf tensors.
"""

from __future__ import annotations

import gc
import inspect
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch

from memprof.trace.events import CycleKind
from memprof.watch.collection import find_referrers
from memprof.watch.graph import collect_nodes, is_leaf
from memprof.watch.program_code import is_memprof_class, is_program
from memprof.watch.source_lines import find_attribute_line, find_class_line, find_line, format_code_line

MAX_STARTS = 64  # objects from which a cycle is looked for: the oldest tensors, and what refers to them

MAX_TENSORS = 8  # of these

MAX_OBJECTS = 5_000  # that are looked at from one start

MAX_NODES = 2_000  # of an autograd graph

_LEVELS_UP = 16  # of referrers: two or three for each level of the modules that have a parameter

_CREATES_GRAPH = r"\.backward\(.*create_graph\s*=\s*True"

# Objects that lead out of the program's data, or to all of it. A running frame has what it has as variables.
_IGNORED_TYPES = (type, types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType, str, bytes, int)


class Cycle(NamedTuple):
    """A reference cycle: its kind, a name that shows it, and the line of the program that closes it, if it is known."""

    kind: CycleKind
    name: str
    source: str | None


def find_cycle(tensors: Sequence[torch.Tensor], codes: Iterable[CodeType]) -> Cycle | None:
    """Return the cycle that keeps `tensors`, oldest first; None if none was found. `codes` are of running functions."""
    for start in _list_starts(tensors):
        if ring := _find_ring(start):
            return _describe(ring, codes)
    return None


def _list_starts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return `tensors` and what refers to them, nearest first, without frames and what the search itself has made."""
    starts: dict[int, Any] = {id(tensor): tensor for tensor in tensors[:MAX_TENSORS]}
    ignored = {id(tensors), id(starts)}
    level: list[Any] = list(starts.values())
    for _ in range(_LEVELS_UP):
        ignored.add(id(level))
        found = find_referrers(level)
        ignored.add(id(found))
        level = [
            value for value in found if id(value) not in starts and id(value) not in ignored and not _is_ignored(value)
        ]
        if not level or len(starts) >= MAX_STARTS:
            break
        starts |= {id(value): value for value in level[:MAX_STARTS]}
    return list(starts.values())


def _find_ring(start: Any) -> list[Any]:
    """Return the shortest list of objects from `start`, each of which refers to the next, and the last to `start`."""
    came_from: dict[int, Any] = {id(start): None}
    alive = [start]  # so that no id is used twice
    pending = deque([start])
    while pending and len(alive) < MAX_OBJECTS:
        value = pending.popleft()
        for part in _iterate_references(value):
            if part is start:
                ring = [value]
                while ring[0] is not start:
                    ring.insert(0, came_from[id(ring[0])])
                return ring
            if id(part) not in came_from:
                came_from[id(part)] = value
                alive.append(part)
                pending.append(part)
    return []


def _iterate_references(value: Any) -> Iterator[Any]:
    """Yield what `value` refers to, with what an autograd graph keeps; of a function only what it has bound."""
    kind = type(value)
    parts: Iterable[Any]
    if issubclass(kind, types.FunctionType):
        parts = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif issubclass(kind, torch.Tensor):
        nodes = collect_nodes([value], MAX_NODES)
        kept = (getattr(node, "variable", node) for node in nodes)
        parts = (_read_grad(value), *kept, *gc.get_referents(value))
    else:
        parts = gc.get_referents(value)
    for part in parts:
        if part is not None and not _is_ignored(part):
            yield part


def _is_ignored(value: Any) -> bool:
    """Return whether `value` leads out of the program's data, or is memprof's own."""
    kind = type(value)
    return issubclass(kind, _IGNORED_TYPES) or (is_memprof_class(kind) and not issubclass(kind, torch.Tensor))


def _read_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return `tensor.grad`, or None where torch warns that it is never set."""
    return tensor.grad if is_leaf(tensor) or tensor.retains_grad else None


def _describe(ring: Sequence[Any], codes: Iterable[CodeType]) -> Cycle:
    ids = {id(value) for value in ring}
    for value, part in zip(ring, [*ring[1:], ring[0]], strict=True):
        if (function := getattr(type(value), "_forward_cls", None)) is not None:
            name = next((name for name, held in vars(value).items() if id(held) in ids), "")
            return Cycle(CycleKind.CTX, f"ctx.{name} of {function.__name__}", _find_closing_line([function], name))
        if issubclass(type(value), torch.Tensor) and part is _read_grad(value):
            lines = (find_line(code, _CREATES_GRAPH) for code in codes)
            source = next((line for line in lines if line is not None), None)
            return Cycle(CycleKind.GRAD, "tensor -> .grad -> its graph -> tensor", source)
    functions = [value for value in ring if issubclass(type(value), types.FunctionType) and is_program(value.__code__)]
    if functions:
        return Cycle(CycleKind.FUNCTION, functions[0].__qualname__, _find_passing_line(functions[0]))
    names, source = [], None
    for value in ring:
        name = next((name for name, held in _read_attributes(value).items() if id(held) in ids), None)
        if name is not None:
            names.append(f"{type(value).__name__}.{name}")
            source = source or _find_closing_line([type(other) for other in ring], name)
    return Cycle(CycleKind.OBJECTS, " -> ".join([*names, *names[:1]]), source)


def _find_passing_line(function: types.FunctionType) -> str:
    """Return the line of the enclosing function that passes `function` on, as to register it; else its first line."""
    path, _, name = function.__qualname__.rpartition(".<locals>.")
    enclosing: Any = types.SimpleNamespace(**function.__globals__)
    for part in path.split("."):
        enclosing = getattr(enclosing, part, None)
    passing = rf"[(,=]\s*{re.escape(name)}\s*[,)]"
    found = find_line(enclosing.__code__, passing) if isinstance(enclosing, types.FunctionType) else None
    return found or format_code_line(function.__code__)


def _read_attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if type(attributes) is dict and not issubclass(type(value), _IGNORED_TYPES) else {}


def _find_closing_line(kinds: Sequence[type], attribute: str) -> str | None:
    """Return the line at which one of the program's classes in `kinds` assigns to `attribute`; else a class's line."""
    parts = [getattr(part, "__func__", part) for kind in kinds for part in vars(kind).values()]
    methods = [inspect.unwrap(part) for part in parts if isinstance(part, types.FunctionType)]
    codes = [method.__code__ for method in methods if is_program(method.__code__)]
    lines = [line for code in codes if (line := find_attribute_line([code], attribute)) is not None]
    own = (kind for kind in kinds if any(code.co_qualname.startswith(f"{kind.__qualname__}.") for code in codes))
    return lines[0] if lines else next((find_class_line(kind) for kind in own), None)
