"""Search for the objects with a name in the program from which tensors are reachable.

`gc.get_referrers` finds all referrers of an object except variables of running functions, which are read from frames.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from memprof.watch.collection import find_referrers
from memprof.watch.frames import find_running_frame_ids, read_local_variables
from memprof.watch.program_code import is_program
from memprof.watch.variables import HolderName, ProgramVariables, read_instance_attributes

MAX_DEPTH = 10  # references from a named object to a tensor; each module on the way is one

MAX_OBJECTS = 50_000  # objects per depth; with more, the search has left the program's own objects

_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_REGISTRIES = ("_modules", "_parameters", "_buffers")  # dicts of a module
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_IGNORED_TYPES = (types.ModuleType, types.BuiltinFunctionType, types.CodeType)
_NAMELESS_TYPES = (BackwardHook,)  # objects of torch's own, whose attributes no program knows


@dataclass(slots=True)
class NamedHolder:
    """Object with a name in the program, and the ids of the tensors that are reachable from it."""

    held: Any
    # Number of references to the tensors: 1 for a container of tensors; the largest, if the tensors' depths differ.
    depth: int
    tensors: set[int]
    names: list[HolderName] = field(default_factory=list)
    keys: tuple[str, ...] = ()  # keys through nested dicts to the container that has all the tensors


def find_named_holders(
    tensors: Mapping[int, tuple[Any, int]], variables: ProgramVariables, *, skipped: tuple[type, ...] = ()
) -> list[NamedHolder]:
    """Return every named object from which `tensors` are reachable within MAX_DEPTH references, by no object of the
    classes `skipped`. A module and the dicts that have its attributes and parts are one object."""
    ignored_ids: set[int] = {id(tensors), id(variables), id(variables.names), id(variables.tensors)}
    ignored_ids.update(id(pair) for pair in tensors.values())
    ignored_ids.update(id(pair) for pair in variables.tensors)
    ignored_ids |= find_running_frame_ids()
    current_level: dict[int, Any] = {key: tensor for key, (tensor, _) in tensors.items()}
    tensors_below: dict[int, set[int]] = {key: {key} for key in current_level}
    last_tensor_depth = dict.fromkeys(current_level, 0)
    holder_by_id: dict[int, NamedHolder] = {}
    module_by_dict = _find_module_dicts()
    ignored_ids.add(id(module_by_dict))

    def add_name(value: Any, holder_name: HolderName) -> None:
        holder = holder_by_id.setdefault(id(value), NamedHolder(value, 0, tensors_below[id(value)]))
        if holder_name not in holder.names:
            holder.names.append(holder_name)

    for depth in range(MAX_DEPTH):
        for key, value in current_level.items():
            for holder_name in variables.names.get(key, ()):
                add_name(value, holder_name)
        ignored_ids.add(id(current_level))
        referrers = find_referrers(current_level.values())
        ignored_ids.add(id(referrers))
        next_level: dict[int, Any] = {}
        ignored_ids.add(id(next_level))
        for referrer in referrers:
            kind = type(referrer)
            if (
                id(referrer) in ignored_ids
                or issubclass(kind, (*_IGNORED_TYPES, *skipped))
                or kind is NamedHolder
                or kind is ProgramVariables
            ):
                continue
            if issubclass(kind, type):
                for attribute, value in list(vars(referrer).items()):
                    if id(value) in tensors_below and not attribute.startswith("__"):
                        add_name(value, HolderName(f"{referrer.__name__}.{attribute}", None, referrer))
                continue
            if kind is types.FunctionType and is_program(referrer.__code__):
                for variable, cell in zip(referrer.__code__.co_freevars, referrer.__closure__ or (), strict=True):
                    if (
                        id(cell) in tensors_below
                        and (held := _read_cell(cell)) is not None
                        and id(held) in tensors_below
                    ):
                        add_name(held, HolderName(variable, referrer.__code__))
            if kind is dict and (module := _find_module_name(referrer)) is not None:
                for variable, value in list(referrer.items()):
                    if id(value) in current_level:
                        add_name(value, HolderName(f"{module}.{variable}", None))
                continue
            if kind is dict and "__builtins__" in referrer:
                continue  # the namespace of the program, which each of its functions has: its names are variables
            if kind is types.GeneratorType:
                if referrer.gi_frame is not None:
                    for variable, value in read_local_variables(referrer.gi_frame).items():
                        if id(value) in current_level:
                            add_name(value, HolderName(variable, referrer.gi_code))
                continue
            parts: set[int] = set()
            for child in gc.get_referents(referrer):
                if id(child) in current_level:
                    parts |= tensors_below[id(child)]
            referrer = module_by_dict.get(id(referrer), referrer)
            kind = type(referrer)
            # The set is extended in place: a holder found before with a part of the tensors gets all of them.
            held = tensors_below.setdefault(id(referrer), set())
            if not parts <= held:
                held |= parts
                next_level[id(referrer)] = referrer
                last_tensor_depth[id(referrer)] = depth + 1
            if not issubclass(kind, (*_CONTAINERS, *_NAMELESS_TYPES)):
                for attribute, value in _read_attributes(referrer).items():
                    if id(value) in tensors_below and not attribute.startswith("__"):
                        add_name(value, HolderName(f"{kind.__name__}.{attribute}", None, kind))
        del referrers
        current_level = next_level
        if not current_level or len(current_level) > MAX_OBJECTS:
            break
    for holder in holder_by_id.values():
        holder.depth = last_tensor_depth[id(holder.held)]
        holder.keys = tuple(_find_inner_keys(holder.held, tensors_below))
    return [*holder_by_id.values(), *_join_module_attributes(holder_by_id.values())]


def _find_module_dicts() -> dict[int, nn.Module]:
    """Return id of a dict -> the module whose attributes, submodules, parameters or buffers it has."""
    result: dict[int, nn.Module] = {}
    for value in gc.get_objects():
        if issubclass(type(value), nn.Module):
            attributes = object.__getattribute__(value, "__dict__")
            dicts = [attributes, *(attributes[name] for name in _REGISTRIES if name in attributes)]
            result.update((id(one), value) for one in dicts)
    return result


def _join_module_attributes(holders: Iterable[NamedHolder]) -> list[NamedHolder]:
    """Return a holder for each attribute that several modules of one class have: what hooks put on the layers."""
    by_name: dict[str, list[NamedHolder]] = defaultdict(list)
    for holder in holders:
        for name in holder.names:
            if name.owner is not None and issubclass(name.owner, nn.Module) and not _is_weight_or_module(holder.held):
                by_name[name.text].append(holder)
    return [
        NamedHolder(
            same[0].held,
            max(holder.depth for holder in same),
            set().union(*(holder.tensors for holder in same)),
            [name for name in same[0].names if name.text == text],
        )
        for text, same in by_name.items()
        if len(same) > 1
    ]


def _is_weight_or_module(value: Any) -> bool:
    return isinstance(value, (nn.Module, nn.Parameter))


def _find_inner_keys(held: Any, tensors_below: Mapping[int, set[int]]) -> Iterator[str]:
    """Yield the keys from dict `held` through nested dicts to the innermost container that has all its tensors."""
    while issubclass(type(held), dict):
        tensors = tensors_below[id(held)]
        inner = [(key, value) for key, value in held.items() if tensors_below.get(id(value)) == tensors]
        if len(inner) != 1:
            return
        ((key, held),) = inner
        if type(key) is not str or not issubclass(type(held), _CONTAINERS):
            return
        yield key


def _read_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of `value` as the program writes them: of a module also its submodules, parameters and
    buffers, but not the dicts of torch that have these and its hooks."""
    attributes = read_instance_attributes(value)
    if not issubclass(type(value), nn.Module):
        return attributes
    registered = [attributes.get(registry) or {} for registry in _REGISTRIES]
    own = {name: part for name, part in attributes.items() if name not in _MODULE_INTERNALS}
    # The parts of a Sequential have numbers for names.
    return own | {name: part for parts in registered for name, part in list(parts.items()) if name.isidentifier()}


def _find_module_name(namespace: dict[Any, Any]) -> str | None:
    """Return the name of the imported module whose globals are the dict `namespace`; None if there is none."""
    module = namespace.get("__name__")
    if not isinstance(module, str) or module not in sys.modules:
        return None
    return module if getattr(sys.modules[module], "__dict__", None) is namespace else None


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
