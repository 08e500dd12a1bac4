"""Search for holders: the variables, attributes and containers of the program that keep tensors alive.

`gc.get_referrers` finds all referrers of an object except variables of running functions, which are read from frames.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import inspect
import sys
import traceback
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from memprof.torch_private import autograd
from memprof.trace.events import NONE, Holder
from memprof.watch.collection import disable_garbage_collection
from memprof.watch.cycles import find_cycle
from memprof.watch.frames import find_running_frame_ids, read_local_variables
from memprof.watch.graph import collect_nodes
from memprof.watch.program_code import is_program, is_program_class
from memprof.watch.reachability import list_unreachable
from memprof.watch.recorder import Recorder
from memprof.watch.source_lines import (
    find_assignment_line,
    find_attribute_line,
    find_class_line,
    find_fill_line,
    format_code_line,
)

MAX_DEPTH = 10  # references from a named object to a tensor: a list of models has parameters at depth 6

MIN_PART_FRACTION = 0.9  # a part with this fraction of an object's bytes is reported instead of the object

MAX_OBJECTS = 50_000  # objects per depth; with more, the search has left the program's own objects

MAX_NODES = 200_000  # autograd nodes that are counted

_MAX_PARTS = 64  # items of a container that are checked for running sums
_MAX_SUM_NODES = 2_000  # nearest nodes of a sum's graph that are checked; they include the sums of several steps
_MAX_SUM_DEPTH = 3  # references from a variable to a sum: `self.meters["loss"].sum`
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_IGNORED_TYPES = (types.ModuleType, types.BuiltinFunctionType, types.CodeType)
# AccumulateGrad nodes have larger sequence numbers than all other nodes, because the engine runs them first.
_MIN_ACCUMULATE_GRAD_NUMBER = 1 << 62


@dataclass(slots=True)
class _HolderName:
    """Name of an object in the program's code: a variable (`losses`), attribute (`Trainer.losses`) or item."""

    text: str
    code: CodeType | None  # code of the function that has the variable
    owner: type | None = None  # class that has the attribute
    is_global: bool = False  # a global, which any function may fill; `code` is of a function in its module


@dataclass(slots=True)
class _NamedHolder:
    """Object with a name in the program, and the ids of the tensors that are reachable from it."""

    held: Any
    # Number of references to the tensors: 1 for a container of tensors; the largest, if the tensors' depths differ.
    depth: int
    tensors: set[int]
    names: list[_HolderName] = field(default_factory=list)
    keys: tuple[str, ...] = ()  # keys through nested dicts to the container that has all the tensors


class HolderSearch:
    """Search through all Python objects for holders of tensors; keeps no references to objects between searches.

    A search allocates enough objects to start Python's garbage collector, which it must not: that frees tensors.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Autograd's sequence number at the start of each step (the first call of a model), and in `_step_ends` after
        # the step's optimizers. Nodes created between two steps belong to no step.
        self._step_begins: list[int] = []
        self._step_ends: list[int] = []
        self._pass_begins: list[int] = []  # the same at the start of each micro-batch since an optimizer's step

    def record_step_begin(self) -> None:
        """Record that a training step begins."""
        self._step_begins.append(autograd.get_sequence_nr())
        self._step_ends.append(_MIN_ACCUMULATE_GRAD_NUMBER)

    def record_pass_begin(self) -> None:
        """Record that the forward of a micro-batch begins."""
        self._pass_begins.append(autograd.get_sequence_nr())

    def record_step_end(self) -> None:
        """Record that an optimizer's step ends; the last such call of a training step counts as the step's end."""
        self._pass_begins.clear()
        if self._step_ends:
            self._step_ends[-1] = autograd.get_sequence_nr()

    @disable_garbage_collection()
    def find_holders(self, targets: Mapping[int, object], *, outermost: bool = False) -> list[Holder]:
        """Return the holders of the storages in `targets`, largest first. `targets` maps storage index -> group key.

        A holder is the innermost object with nearly all the bytes, or the `outermost`: the trainer, not its model.
        A holder must keep most of the older storages of a group, because the newest ones are in local variables too.
        A holder that is itself a tensor must keep all of them, as in `all = torch.cat([all, out])`.
        """
        with torch.DisableTorchFunction():
            tensors = self._find_tensors(targets)
            variables = _ProgramVariables(self._recorder)
            holders = _find_named_holders(tensors, variables)
            all_storages = self._recorder.trace.storages
            num_bytes = {
                id(h): sum(all_storages[i].num_bytes for i in {tensors[t][1] for t in h.tensors}) for h in holders
            }
            # Holders with equal bytes: the one with the fewest references to the tensors first.
            ordered = sorted(holders, key=lambda holder: (-num_bytes[id(holder)], holder.depth))
            indices_by_key: dict[object, list[int]] = defaultdict(list)
            for index, key in sorted(targets.items()):
                indices_by_key[key].append(index)
            explained: set[object] = set()
            result = []
            for outer in ordered:
                # If nearly all bytes of an object are in a list inside it, the list is the container that grows.
                min_bytes = MIN_PART_FRACTION * num_bytes[id(outer)]
                inner = [h for h in ordered if num_bytes[id(h)] >= min_bytes and h.tensors <= outer.tensors]
                choose = max if outermost else min
                holder = choose(inner, key=lambda other: other.depth)
                storages = {tensors[t][1] for t in holder.tensors}
                is_tensor = issubclass(type(holder.held), torch.Tensor)
                keys = {
                    key
                    for key, members in indices_by_key.items()
                    if _includes_counterparts(storages, members, all_required=is_tensor)
                }
                if keys - explained:
                    explained |= keys
                    roots = [tensors[t][0] for t in holder.tensors]
                    result.append(self._make_holder(holder, storages, roots, variables))
            return result

    @disable_garbage_collection()
    def find_holder_of_error(self, error: BaseException) -> Holder | None:
        """Return the nearest variable or container that has `error`; `storages` is empty.

        The variable may be in a frame of the error's own traceback: the two keep each other after the frame has ended.
        """
        variables = _ProgramVariables(self._recorder)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if is_program(frame.f_code):
                variables.add(read_local_variables(frame), frame.f_code)
        holders = _find_named_holders({id(error): (error, NONE)}, variables)
        nearest = min(holders, key=lambda holder: holder.depth, default=None)
        return None if nearest is None else self._make_holder(nearest, set(), [], variables)

    @disable_garbage_collection()
    def find_cycles(self, targets: Mapping[int, object]) -> list[Holder]:
        """Return the reference cycle that keeps storages in `targets`, which no holder explains, as the only item."""
        with torch.DisableTorchFunction():
            found = self._find_tensors(targets)
            oldest_first = [tensor for tensor, _ in sorted(found.values(), key=lambda pair: pair[1])]
            cycle = find_cycle(oldest_first, _ProgramVariables(self._recorder).codes)
        if cycle is None:
            return []
        event, storages = len(self._recorder.trace.events), tuple(sorted(targets))
        return [Holder(event, *cycle, cycle.source is not None, None, storages, 0, 0, None)]

    @disable_garbage_collection()
    def find_garbage(self, targets: Mapping[int, object]) -> list[Holder]:
        """Return the reference cycle that keeps those storages in `targets` that the program cannot reach, and that
        Python's garbage collector will free, as the only item."""
        found = self._find_tensors(targets)
        indices = {id(tensor): index for tensor, index in found.values()}
        unreachable = list_unreachable([tensor for tensor, _ in found.values()])
        return self.find_cycles({indices[id(tensor)]: targets[indices[id(tensor)]] for tensor in unreachable})

    @disable_garbage_collection()
    def find_in_variables(self, storages: set[int]) -> set[int]:
        """Return those of `storages` that variables have, directly or indirectly, other than by a traceback."""
        tensors = self._find_tensors(dict.fromkeys(storages))
        holders = _find_named_holders(tensors, _ProgramVariables(self._recorder), skipped=(FrameType,))
        held = {key for holder in holders if any(name.owner is None for name in holder.names) for key in holder.tensors}
        return {tensors[key][1] for key in held}

    @disable_garbage_collection()
    def find_running_sums(self, *, of_passes: bool = False) -> list[Holder]:
        """Return the variables and attributes whose autograd graph spans several steps (`total = total + loss`); with
        `of_passes` several micro-batches since the last step (`out, hidden = model(x, hidden)`)."""
        begins = self._pass_begins if of_passes else self._step_begins
        with torch.DisableTorchFunction():
            variables = _ProgramVariables(self._recorder)
            sums: dict[Any, tuple[_NamedHolder, list[Any]]] = {}
            for name, value in variables.tensors:
                if value.grad_fn is None:
                    continue
                if value.grad_fn in sums:
                    sums[value.grad_fn][0].names.append(name)
                    continue
                nodes = collect_nodes([value], _MAX_SUM_NODES)
                rounds = self._find_passes(nodes) if of_passes else self._find_steps(nodes)
                # The graph of a sum that is updated after the optimizer's step does not include the last step.
                if min(rounds, default=2) == 1 and len(rounds) >= max(len(begins) - 1, 2):
                    sums[value.grad_fn] = _NamedHolder(value, 0, set(), [name]), nodes
            # Values computed from a sum span as many steps, but are not what keeps the graph alive.
            independent = [holder for holder, nodes in sums.values() if not any(node in sums for node in nodes[1:])]
            return [
                self._make_holder(
                    holder, {self._recorder.storages.get_index(holder.held)} - {NONE}, [holder.held], variables
                )
                for holder in independent
            ]

    def _find_tensors(self, targets: Mapping[int, object]) -> dict[int, tuple[torch.Tensor, int]]:
        """Return id -> (tensor, storage index) for all live tensor objects whose storage is in `targets`."""
        result = {}
        for value in gc.get_objects():
            if issubclass(type(value), torch.Tensor):
                index = self._recorder.storages.get_index(value)
                if index in targets:
                    result[id(value)] = (value, index)
        return result

    def _find_steps(self, nodes: list[Any]) -> set[int]:
        """Return the steps (from 1) in which the autograd `nodes` were created, without nodes created between steps."""
        steps = set()
        for number in (node._sequence_nr() for node in nodes):
            step = bisect.bisect_right(self._step_begins, number)
            if step and number < min(self._step_ends[step - 1], _MIN_ACCUMULATE_GRAD_NUMBER):
                steps.add(step)
        return steps

    def _find_passes(self, nodes: list[Any]) -> set[int]:
        """Return the micro-batches since the last step (from 1) in which the autograd `nodes` were created."""
        numbers = (node._sequence_nr() for node in nodes)
        passes = {bisect.bisect_right(self._pass_begins, n) for n in numbers if n < _MIN_ACCUMULATE_GRAD_NUMBER}
        return passes - {0}

    def _make_holder(
        self, found: _NamedHolder, storages: set[int], roots: list[torch.Tensor], variables: _ProgramVariables
    ) -> Holder:
        value = found.held
        keys = "".join(f"[{key!r}]" for key in found.keys)
        names = [dataclasses.replace(name, text=name.text + keys) for name in found.names]
        for key in found.keys:
            value = value[key]
        lines = [(name, _find_filling_line(name, variables.codes)) for name in names]
        name, line = next(((name, line) for name, line in lines if line is not None), (names[0], None))
        holder_source = line
        if is_cached := isinstance(value, functools._lru_cache_wrapper):
            holder_source, name = format_code_line(inspect.unwrap(value).__code__), _HolderName(value.__name__, None)
        elif holder_source is None and name.code is not None:
            codes = variables.codes if name.is_global else [name.code]
            assignments = (find_assignment_line(code, name.text.partition("[")[0]) for code in codes)
            holder_source = next((found for found in assignments if found is not None), format_code_line(name.code))
        elif holder_source is None and name.owner is not None:
            # A hook of the program may set an attribute of torch's class: `module.output = output`.
            holder_source = find_class_line(name.owner) if is_program_class(name.owner) else None
            if holder_source is None:
                codes = [*variables.codes, *variables.iterate_global_codes()]
                holder_source = find_attribute_line(codes, name.text.rpartition(".")[2])
        nodes = collect_nodes([root for root in roots if root.grad_fn is not None], MAX_NODES)
        return Holder(
            event=len(self._recorder.trace.events),
            kind="" if isinstance(value, torch.Tensor) else "lru_cache" if is_cached else type(value).__name__,
            name=name.text,
            source=holder_source,
            fills=is_cached or line is not None,
            limit=value.cache_parameters()["maxsize"] if is_cached else getattr(value, "maxlen", None),
            storages=tuple(sorted(storages)),
            nodes=len(nodes),
            node_steps=len(self._find_steps(nodes)),
            batches=variables.num_loader_batches,
            has_reset=any(callable(getattr(kind, "reset", None)) for kind in (type(value), name.owner)),
        )


def _includes_counterparts(storages: set[int], counterparts: list[int], *, all_required: bool) -> bool:
    """Return whether `storages` include all `counterparts` if `all_required`, else most of the first (older) half."""
    if all_required:
        return storages.issuperset(counterparts)
    older = counterparts[: (len(counterparts) + 1) // 2]
    return 2 * len(storages.intersection(older)) > len(older)


class _ProgramVariables:
    """Local variables of the program's running functions, innermost first, and the globals of their modules."""

    def __init__(self, recorder: Recorder) -> None:
        self.names: dict[int, list[_HolderName]] = {}  # by the id of the value
        self.num_loader_batches: int | None = None
        # Variables that are tensors, and tensors in attributes and containers of the program.
        self.tensors: list[tuple[_HolderName, torch.Tensor]] = []
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
                self.add(values, code)
                if not loaders:
                    loaders = {id(v): v for v in values.values() if _is_loader(v)}
                if not any(namespace is frame.f_globals for namespace in self._globals):
                    self._globals.append(frame.f_globals)
                if code.co_flags & inspect.CO_OPTIMIZED and id(frame.f_globals) not in seen_globals:
                    seen_globals.add(id(frame.f_globals))
                    self.add(dict(frame.f_globals), code, is_global=True)
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

    def add(self, values: dict[str, Any], code: CodeType, *, is_global: bool = False) -> None:
        """Add the variables `values` of the function that `code` is of; `is_global`: of its module."""
        for name, value in values.items():
            kind = type(value)
            if issubclass(kind, (types.ModuleType, types.FunctionType, type, int, float, str, bytes, type(None))):
                continue
            self.names.setdefault(id(value), []).append(_HolderName(name, code, is_global=is_global))
            self.tensors += _iterate_named_tensors(_HolderName(name, code), value, _MAX_SUM_DEPTH)


def _iterate_named_tensors(name: _HolderName, value: Any, depth: int) -> Iterator[tuple[_HolderName, torch.Tensor]]:
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
    elif not kind.__module__.startswith(("torch.", "memprof.", "builtins")):
        for attribute, part in _read_instance_attributes(value).items():
            yield from _iterate_named_tensors(_HolderName(f"{kind.__name__}.{attribute}", None, kind), part, depth - 1)


def _is_loader(value: Any) -> bool:
    """Return whether `value` is a DataLoader, or a wrapper (of accelerate) that passes isinstance(..., DataLoader)."""
    kind = type(value)
    return issubclass(kind, DataLoader) or ("DataLoader" in kind.__name__ and isinstance(value, DataLoader))


def _find_named_holders(
    tensors: Mapping[int, tuple[Any, int]], variables: _ProgramVariables, *, skipped: tuple[type, ...] = ()
) -> list[_NamedHolder]:
    """Return every named object from which `tensors` are reachable within MAX_DEPTH references, by no object of the
    classes `skipped`."""
    ignored_ids: set[int] = {id(tensors), id(variables), id(variables.names), id(variables.tensors)}
    ignored_ids.update(id(pair) for pair in tensors.values())
    ignored_ids.update(id(pair) for pair in variables.tensors)
    ignored_ids |= find_running_frame_ids()
    current_level: dict[int, Any] = {key: tensor for key, (tensor, _) in tensors.items()}
    tensors_below: dict[int, set[int]] = {key: {key} for key in current_level}
    last_tensor_depth = dict.fromkeys(current_level, 0)
    holder_by_id: dict[int, _NamedHolder] = {}

    def add_name(value: Any, holder_name: _HolderName) -> None:
        holder = holder_by_id.setdefault(id(value), _NamedHolder(value, 0, tensors_below[id(value)]))
        holder.names.append(holder_name)

    for depth in range(MAX_DEPTH):
        for key, value in current_level.items():
            for holder_name in variables.names.get(key, ()):
                add_name(value, holder_name)
        ignored_ids.add(id(current_level))
        referrers = gc.get_referrers(*current_level.values())
        ignored_ids.add(id(referrers))
        next_level: dict[int, Any] = {}
        ignored_ids.add(id(next_level))
        for referrer in referrers:
            kind = type(referrer)
            if (
                id(referrer) in ignored_ids
                or issubclass(kind, (*_IGNORED_TYPES, *skipped))
                or kind is _NamedHolder
                or kind is _ProgramVariables
            ):
                continue
            if issubclass(kind, type):
                for attribute, value in list(vars(referrer).items()):
                    if id(value) in tensors_below and not attribute.startswith("__"):
                        add_name(value, _HolderName(f"{referrer.__name__}.{attribute}", None, referrer))
                continue
            if kind is types.FunctionType:
                for variable, cell in zip(referrer.__code__.co_freevars, referrer.__closure__ or (), strict=True):
                    if (
                        id(cell) in tensors_below
                        and (held := _read_cell(cell)) is not None
                        and id(held) in tensors_below
                    ):
                        add_name(held, _HolderName(variable, referrer.__code__))
            if kind is dict and (module := _find_module_name(referrer)) is not None:
                for variable, value in list(referrer.items()):
                    if id(value) in current_level:
                        add_name(value, _HolderName(f"{module}.{variable}", None))
                continue
            if kind is types.GeneratorType:
                if referrer.gi_frame is not None:
                    for variable, value in read_local_variables(referrer.gi_frame).items():
                        if id(value) in current_level:
                            add_name(value, _HolderName(variable, referrer.gi_code))
                continue
            parts: set[int] = set()
            for child in gc.get_referents(referrer):
                if id(child) in current_level:
                    parts |= tensors_below[id(child)]
            if parts:
                next_level[id(referrer)] = referrer
                # The set is extended in place: a holder found before with a part of the tensors gets all of them.
                held = tensors_below.setdefault(id(referrer), set())
                if not parts <= held:
                    held |= parts
                    last_tensor_depth[id(referrer)] = depth + 1
            if not issubclass(kind, _CONTAINERS):
                for attribute, value in _read_attributes(referrer).items():
                    if id(value) in tensors_below and not attribute.startswith("__"):
                        add_name(value, _HolderName(f"{kind.__name__}.{attribute}", None, kind))
        del referrers
        current_level = next_level
        if not current_level or len(current_level) > MAX_OBJECTS:
            break
    for holder in holder_by_id.values():
        holder.depth = last_tensor_depth[id(holder.held)]
        holder.keys = tuple(_find_inner_keys(holder.held, tensors_below))
    return [*holder_by_id.values(), *_join_module_attributes(holder_by_id.values())]


def _join_module_attributes(holders: Iterable[_NamedHolder]) -> list[_NamedHolder]:
    """Return a holder for each attribute that several modules of one class have: what hooks put on the layers."""
    by_name: dict[str, list[_NamedHolder]] = defaultdict(list)
    for holder in holders:
        for name in holder.names:
            if name.owner is not None and issubclass(name.owner, nn.Module) and not _is_weight_or_module(holder.held):
                by_name[name.text].append(holder)
    return [
        _NamedHolder(
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
    attributes = _read_instance_attributes(value)
    if not issubclass(type(value), nn.Module):
        return attributes
    registered = [attributes.get(registry) or {} for registry in ("_modules", "_parameters", "_buffers")]
    own = {name: part for name, part in attributes.items() if name not in _MODULE_INTERNALS}
    # The parts of a Sequential have numbers for names.
    return own | {name: part for parts in registered for name, part in list(parts.items()) if name.isidentifier()}


def _read_instance_attributes(value: Any) -> dict[str, Any]:
    """Return a copy of the `__dict__` of `value`, without evaluating properties; empty if it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(attributes) if type(attributes) is dict else {}


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


def _find_filling_line(name: _HolderName, running_codes: list[CodeType]) -> str | None:
    """Return `file:line function` of the source line that fills the holder: in the function of a variable, in the class
    of an attribute; for globals and attributes also in `running_codes`. None if there is no such line."""
    qualified_name, bracket, keys = name.text.partition("[")
    variable = qualified_name.rpartition(".")[2]
    codes = [] if name.code is None else [name.code]
    if name.owner is not None:
        methods = [inspect.unwrap(part) for part in vars(name.owner).values() if isinstance(part, types.FunctionType)]
        codes = [part.__code__ for part in methods if isinstance(part, types.FunctionType)]
        codes = [code for code in codes if is_program(code)]
    if name.is_global or name.owner is not None:
        codes += running_codes
    # Also search without the keys, since the program may use a variable as a key.
    lines = (
        find_fill_line(code, variable, is_attribute=name.owner is not None, keys=key_text)
        for key_text in dict.fromkeys((bracket + keys, ""))
        for code in codes
    )
    return next((line for line in lines if line is not None), None)
