"""Holders of live tensors: the variable, attribute or container, by the name that the program has for it.

Python knows who refers to an object, but for the variables of functions that are running: those are read off the
frames.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import inspect
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from memprof.torch_private import autograd
from memprof.trace.events import NONE, Holder
from memprof.watch.frames import local_variables
from memprof.watch.program_code import is_program
from memprof.watch.recorder import Recorder
from memprof.watch.source_lines import line_of_class, line_of_code, line_that_fills

MAX_DEPTH = 10  # containers in containers, up to a name: a list of models holds parameters at the sixth

MOST = 0.9  # of what an object holds: a part of it that has so much is the one to name

MAX_OBJECTS = 50_000  # of one depth; more is a sign that the search has left the program

MAX_NODES = 200_000  # autograd nodes that are counted

_MOST_PARTS = 64  # of a container, among which running sums are looked for
_SUM_NODES = 2_000  # of a running sum's graph, nearest first: the sums of several steps are among them
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PASSED_OVER = (types.ModuleType, types.BuiltinFunctionType, types.CodeType)
# Nodes that accumulate gradients have a sequence number beyond all others, for they run first.
_IN_FORWARD_ORDER = 1 << 62


@dataclass(slots=True)
class _Name:
    """The program's name for an object."""

    text: str
    code: CodeType | None  # of the function whose variable it is
    owner: type | None = None  # of an attribute: the class
    is_global: bool = False  # whether it is one, which any function may fill; `code` is of one that sees it


@dataclass(slots=True)
class _Found:
    """A named object, and the tensors beneath it, by id."""

    held: Any
    # Of the innermost container that refers to a tensor 1; of one that is met again with more, where it has all.
    depth: int
    tensors: set[int]
    names: list[_Name] = field(default_factory=list)
    keys: tuple[str, ...] = ()  # of a dict, those of the one container in it, and in that, that holds all of them


class HolderSearch:
    """Looks through the program's objects; it keeps none of them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Autograd's sequence number where each step is seen to begin (its first call of a model), and in `_step_ends`
        # where its optimizers were done. What a program computes between two steps, of the outputs that it still has or
        # for the next call, is of no step by itself.
        self._step_begins: list[int] = []
        self._step_ends: list[int] = []

    def step_began(self) -> None:
        """See a step begin."""
        self._step_begins.append(autograd.get_sequence_nr())
        self._step_ends.append(_IN_FORWARD_ORDER)

    def step_ended(self) -> None:
        """See an optimizer step: the step's last one, as far as is known."""
        if self._step_ends:
            self._step_ends[-1] = autograd.get_sequence_nr()

    def holders_of(self, targets: Mapping[int, object]) -> list[Holder]:
        """Return who keeps these storages (by index, with what their counterparts have in common), the largest first.

        Of counterparts, one holder is named, which must have most of the older ones: the last of them are in variables
        as well. A variable that is the tensor itself must have all, as in `all = torch.cat([all, out])`.
        """
        with torch.DisableTorchFunction():
            tensors = self._tensors_of(targets)
            variables = _Variables(self._recorder)
            found = _find_named_holders(tensors, variables)
            sizes = self._recorder.trace.storages
            num_bytes = {
                id(one): sum(sizes[i].num_bytes for i in {tensors[t][1] for t in one.tensors}) for one in found
            }
            # The nearest name of those that hold as much.
            order = sorted(found, key=lambda one: (-num_bytes[id(one)], one.depth))
            kinds: dict[object, list[int]] = defaultdict(list)
            for index, key in sorted(targets.items()):
                kinds[key].append(index)
            explained: set[object] = set()
            result = []
            for outer in order:
                # An object that has a little more than a list in it is not what is filled.
                least = MOST * num_bytes[id(outer)]
                inner = [o for o in order if num_bytes[id(o)] >= least and o.tensors <= outer.tensors]
                one = min(inner, key=lambda o: o.depth)
                storages = {tensors[t][1] for t in one.tensors}
                is_tensor = issubclass(type(one.held), torch.Tensor)
                keys = {key for key, members in kinds.items() if _holds(storages, members, every=is_tensor)}
                if keys - explained:
                    explained |= keys
                    roots = [tensors[t][0] for t in one.tensors]
                    result.append(self._holder(one, storages, roots, variables))
            return result

    def running_sums(self) -> list[Holder]:
        """Return variables, and their attributes, whose graph goes back over several steps: `total = total + loss`."""
        with torch.DisableTorchFunction():
            variables = _Variables(self._recorder)
            sums: dict[Any, tuple[_Found, list[Any]]] = {}
            for name, value in variables.tensors:
                if value.grad_fn is None or value.grad_fn in sums:
                    continue
                nodes = _nodes([value], _SUM_NODES)
                steps = self._steps_of(nodes)
                # What is summed after the optimizer's step lacks the last one.
                if min(steps, default=2) == 1 and len(steps) >= max(len(self._step_begins) - 1, 2):
                    sums[value.grad_fn] = _Found(value, 0, set(), [name]), nodes
            # What is computed of a sum goes back as far, and is not what keeps it.
            own = [found for found, nodes in sums.values() if not any(node in sums for node in nodes[1:])]
            return [
                self._holder(found, {self._recorder.storages.index_of(found.held)} - {NONE}, [found.held], variables)
                for found in own
            ]

    def _tensors_of(self, targets: Mapping[int, object]) -> dict[int, tuple[torch.Tensor, int]]:
        """Return the tensor objects of these storages, by id, and whose storage each is."""
        result = {}
        for value in gc.get_objects():
            if issubclass(type(value), torch.Tensor):
                index = self._recorder.storages.index_of(value)
                if index in targets:
                    result[id(value)] = (value, index)
        return result

    def _steps_of(self, nodes: list[Any]) -> set[int]:
        """Return the steps in which these nodes were made, but for those that were made between two."""
        found = set()
        for number in (node._sequence_nr() for node in nodes):
            step = bisect.bisect_right(self._step_begins, number)
            if step and number < min(self._step_ends[step - 1], _IN_FORWARD_ORDER):
                found.add(step)
        return found

    def _holder(self, found: _Found, storages: set[int], roots: list[torch.Tensor], variables: _Variables) -> Holder:
        held = found.held
        keys = "".join(f"[{key!r}]" for key in found.keys)
        names = [dataclasses.replace(name, text=name.text + keys) for name in found.names]
        for key in found.keys:
            held = held[key]
        lines = [(name, _line_that_fills(name, variables.codes)) for name in names]
        name, line = next(((name, line) for name, line in lines if line is not None), (names[0], None))
        where = line
        if cached := isinstance(held, functools._lru_cache_wrapper):
            where, name = line_of_code(inspect.unwrap(held).__code__), _Name(held.__name__, None)
        elif where is None and name.code is not None:
            where = line_of_code(name.code)
        elif where is None and name.owner is not None:
            where = line_of_class(name.owner)
        nodes = _nodes([root for root in roots if root.grad_fn is not None], MAX_NODES)
        return Holder(
            event=len(self._recorder.trace.events),
            kind="" if isinstance(held, torch.Tensor) else "lru_cache" if cached else type(held).__name__,
            name=name.text,
            source=where,
            fills=cached or line is not None,
            limit=held.cache_parameters()["maxsize"] if cached else getattr(held, "maxlen", None),
            storages=tuple(sorted(storages)),
            nodes=len(nodes),
            node_steps=len(self._steps_of(nodes)),
            batches=variables.batches,
        )


def _holds(storages: set[int], members: list[int], *, every: bool) -> bool:
    """Return whether `storages` hold these counterparts, oldest first: most of the older half, or `every` one."""
    if every:
        return storages.issuperset(members)
    older = members[: (len(members) + 1) // 2]
    return 2 * len(storages.intersection(older)) > len(older)


class _Variables:
    """The variables of the functions that are running, innermost first, and the globals of their modules."""

    def __init__(self, recorder: Recorder) -> None:
        self.names: dict[int, list[_Name]] = {}  # by the id of the value
        self.batches: int | None = None
        # Those that are tensors, and tensors that are attributes of the program's objects or in its containers.
        self.tensors: list[tuple[_Name, torch.Tensor]] = []
        self.codes: list[CodeType] = []
        loaders: dict[int, DataLoader[Any]] = {}
        seen_globals: set[int] = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if is_program(code):
                self.codes.append(code)
                values = local_variables(frame)
                self._add(values, code)
                if not loaders:
                    loaders = {id(v): v for v in values.values() if _is_loader(v)}
                if code.co_flags & inspect.CO_OPTIMIZED and id(frame.f_globals) not in seen_globals:
                    seen_globals.add(id(frame.f_globals))
                    self._add(dict(frame.f_globals), code, is_global=True)
            frame = frame.f_back
        if len(loaders) == 1:
            try:
                self.batches = len(next(iter(loaders.values())))
            except (TypeError, NotImplementedError):  # of a data set without length
                self.batches = None

    def _add(self, values: dict[str, Any], code: CodeType, *, is_global: bool = False) -> None:
        for name, value in values.items():
            kind = type(value)
            if issubclass(kind, (types.ModuleType, types.FunctionType, type, int, float, str, bytes, type(None))):
                continue
            self.names.setdefault(id(value), []).append(_Name(name, code, is_global=is_global))
            if issubclass(kind, torch.Tensor):
                self.tensors.append((_Name(name, code), value))
            elif issubclass(kind, (dict, list)):
                parts = list(value.items() if issubclass(kind, dict) else enumerate(value))[:_MOST_PARTS]
                self.tensors += [
                    (_Name(f"{name}[{key!r}]", code), part)
                    for key, part in parts
                    if issubclass(type(part), torch.Tensor)
                ]
            elif not kind.__module__.startswith(("torch.", "memprof.", "builtins")):
                for attribute, part in _attributes(value).items():
                    if issubclass(type(part), torch.Tensor):
                        self.tensors.append((_Name(f"{kind.__name__}.{attribute}", None, kind), part))


def _is_loader(value: Any) -> bool:
    """Return whether it is a data loader, or says so of itself, as accelerate's wrappers do."""
    kind = type(value)
    return issubclass(kind, DataLoader) or ("DataLoader" in kind.__name__ and isinstance(value, DataLoader))


def _find_named_holders(tensors: Mapping[int, tuple[Any, int]], variables: _Variables) -> list[_Found]:
    """Return everything with a name above these tensors, within MAX_DEPTH."""
    own: set[int] = {id(tensors), id(variables), id(variables.names), id(variables.tensors)}
    own.update(id(pair) for pair in tensors.values())
    own.update(id(pair) for pair in variables.tensors)
    own |= _running_frames()
    level: dict[int, Any] = {key: tensor for key, (tensor, _) in tensors.items()}
    beneath: dict[int, set[int]] = {key: {key} for key in level}
    full_at = dict.fromkeys(level, 0)
    found: dict[int, _Found] = {}

    def name(value: Any, called: _Name) -> None:
        one = found.setdefault(id(value), _Found(value, 0, beneath[id(value)]))
        one.names.append(called)

    for depth in range(MAX_DEPTH):
        for key, value in level.items():
            for called in variables.names.get(key, ()):
                name(value, called)
        own.add(id(level))
        referrers = gc.get_referrers(*level.values())
        own.add(id(referrers))
        above: dict[int, Any] = {}
        own.add(id(above))
        for referrer in referrers:
            kind = type(referrer)
            if id(referrer) in own or issubclass(kind, _PASSED_OVER) or kind is _Found or kind is _Variables:
                continue
            if issubclass(kind, type):
                for attribute, value in list(vars(referrer).items()):
                    if id(value) in beneath and not attribute.startswith("__"):
                        name(value, _Name(f"{referrer.__name__}.{attribute}", None, referrer))
                continue
            if kind is types.FunctionType:
                for variable, cell in zip(referrer.__code__.co_freevars, referrer.__closure__ or (), strict=True):
                    if id(cell) in beneath and (held := _content(cell)) is not None and id(held) in beneath:
                        name(held, _Name(variable, referrer.__code__))
            if kind is dict and (module := _module_of(referrer)) is not None:
                for variable, value in list(referrer.items()):
                    if id(value) in level:
                        name(value, _Name(f"{module}.{variable}", None))
                continue
            if kind is types.GeneratorType:
                if referrer.gi_frame is not None:
                    for variable, value in local_variables(referrer.gi_frame).items():
                        if id(value) in level:
                            name(value, _Name(variable, referrer.gi_code))
                continue
            parts: set[int] = set()
            for child in gc.get_referents(referrer):
                if id(child) in level:
                    parts |= beneath[id(child)]
            if parts:
                above[id(referrer)] = referrer
                # The same set as before: who was found holding some of it holds this too.
                held = beneath.setdefault(id(referrer), set())
                if not parts <= held:
                    held |= parts
                    full_at[id(referrer)] = depth + 1
            if not issubclass(kind, _CONTAINERS):
                for attribute, value in _attributes(referrer).items():
                    if id(value) in beneath and not attribute.startswith("__"):
                        name(value, _Name(f"{kind.__name__}.{attribute}", None, kind))
        del referrers
        level = above
        if not level or len(level) > MAX_OBJECTS:
            break
    for one in found.values():
        one.depth = full_at[id(one.held)]
        one.keys = tuple(_keys(one.held, beneath))
    return list(found.values())


def _keys(held: Any, beneath: Mapping[int, set[int]]) -> Iterator[str]:
    """Yield the keys from a dict to the innermost container that holds all that it does, through dicts alone."""
    while issubclass(type(held), dict):
        tensors = beneath[id(held)]
        inner = [(key, value) for key, value in held.items() if beneath.get(id(value)) == tensors]
        if len(inner) != 1:
            return
        ((key, held),) = inner
        if type(key) is not str or not issubclass(type(held), _CONTAINERS):
            return
        yield key


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's own attributes; those that are computed are not requested."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(attributes) if type(attributes) is dict else {}


def _module_of(namespace: dict[Any, Any]) -> str | None:
    """Return the module whose globals these are."""
    module = namespace.get("__name__")
    if not isinstance(module, str) or module not in sys.modules:
        return None
    return module if getattr(sys.modules[module], "__dict__", None) is namespace else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _running_frames() -> set[int]:
    """Return the ids of the frames that run, in any thread: what they hold are variables. A frame that an exception
    keeps is a container as any other."""
    running = set()
    frames: list[FrameType | None] = list(sys._current_frames().values())
    while frames:
        # This function's own frame is among them: a variable that still held it would keep them all.
        frame = frames.pop()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
    return running


def _line_that_fills(name: _Name, running: list[CodeType]) -> str | None:
    """Return `file:line function`, read off the source: of a variable's function, of an attribute's class; of a global,
    and of an attribute that its class does not fill, of what is running."""
    whole, bracket, keys = name.text.partition("[")
    variable = whole.rpartition(".")[2]
    codes = [] if name.code is None else [name.code]
    if name.owner is not None:
        methods = [inspect.unwrap(part) for part in vars(name.owner).values() if isinstance(part, types.FunctionType)]
        codes = [part.__code__ for part in methods if isinstance(part, types.FunctionType)]
    if name.is_global or name.owner is not None:
        codes += running
    # A program may well have the key in a variable.
    lines = (
        line_that_fills(code, variable, attribute=name.owner is not None, keys=named)
        for named in dict.fromkeys((bracket + keys, ""))
        for code in codes
    )
    return next((line for line in lines if line is not None), None)


def _nodes(roots: list[torch.Tensor], most: int) -> list[Any]:
    """Return the autograd nodes that hang on these tensors, nearest first, up to `most`."""
    queue = deque(root.grad_fn for root in roots)
    seen: dict[Any, None] = {}
    while queue and len(seen) < most:
        node = queue.popleft()
        if node is not None and node not in seen:
            seen[node] = None
            queue.extend(following for following, _ in node.next_functions)
    return list(seen)
