"""Search for holders: the variables, attributes and containers of the program that keep tensors alive."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import inspect
import re
import traceback
import types
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from memprof.torch_private import autograd
from memprof.trace.events import HOOK_KIND, NONE, Holder
from memprof.watch.collection import disable_garbage_collection
from memprof.watch.cycles import find_cycle
from memprof.watch.frames import read_local_variables
from memprof.watch.graph import collect_nodes, find_node
from memprof.watch.named_holders import NamedHolder, find_named_holders
from memprof.watch.piled_hooks import PiledHook, find_piled_hook, find_registering_line
from memprof.watch.program_code import is_program, is_program_class
from memprof.watch.reachability import list_unreachable
from memprof.watch.recorder import Recorder
from memprof.watch.source_lines import (
    find_class_line,
    find_fill_line,
    find_line,
    format_code_line,
    list_assignment_lines,
    list_attribute_lines,
)
from memprof.watch.variables import HolderName, ProgramVariables

MIN_PART_FRACTION = 0.9  # a part with this fraction of an object's bytes is reported instead of the object

MAX_NODES = 200_000  # autograd nodes that are counted

_CONTAINERS = (list, dict, set, deque)

_MAX_SUM_NODES = 2_000  # nearest nodes of a sum's graph that are checked; they include the sums of several steps
# AccumulateGrad nodes have larger sequence numbers than all other nodes, because the engine runs them first.
_MIN_ACCUMULATE_GRAD_NUMBER = 1 << 62


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
        self.pass_begins: list[int] = []  # the same at the start of each micro-batch since an optimizer's step
        self.call_begins: list[int] = []  # the same at the start of each call of a module since a backward pass

    def record_step_begin(self) -> None:
        """Record that a training step begins."""
        self._step_begins.append(autograd.get_sequence_nr())
        self._step_ends.append(_MIN_ACCUMULATE_GRAD_NUMBER)

    def record_pass_begin(self) -> None:
        """Record that the forward of a micro-batch begins."""
        self.pass_begins.append(autograd.get_sequence_nr())

    def record_call_begin(self) -> None:
        """Record that an outermost call of a module begins, which may have a graph."""
        self.call_begins.append(autograd.get_sequence_nr())

    def record_backward_begin(self) -> None:
        """Record that a backward pass begins, for which the graphs of calls may have waited."""
        self.call_begins.clear()

    def record_step_end(self) -> None:
        """Record that an optimizer's step ends; the last such call of a training step counts as the step's end."""
        self.pass_begins.clear()
        if self._step_ends:
            self._step_ends[-1] = autograd.get_sequence_nr()

    @disable_garbage_collection()
    def find_holders(self, targets: Mapping[int, object], *, outermost: bool = False) -> list[Holder]:
        """Return the holders of the storages in `targets`, largest first. `targets` maps storage index -> group key.

        A holder is the innermost object with nearly all the bytes, or the `outermost`: the trainer, not its model.
        A holder must keep most bytes of a group's older storages: the newest ones are in local variables too.
        A holder that is itself a tensor must keep all of them, as in `all = torch.cat([all, out])`.
        """
        with torch.DisableTorchFunction():
            tensors = self._find_tensors(targets)
            variables = ProgramVariables(self._recorder)
            holders = find_named_holders(tensors, variables)
            all_storages = self._recorder.trace.storages
            num_bytes = {
                id(h): sum(all_storages[i].num_bytes for i in {tensors[t][1] for t in h.tensors}) for h in holders
            }
            # Holders with equal bytes: the one with the fewest references to the tensors first.
            ordered = sorted(holders, key=lambda holder: (-num_bytes[id(holder)], holder.depth))
            indices_by_key: dict[object, list[int]] = defaultdict(list)
            for index, key in sorted(targets.items()):
                indices_by_key[key].append(index)
            sizes = {index: all_storages[index].num_bytes for index in targets}

            def find_keys(holder: NamedHolder) -> set[object]:
                storages = {tensors[t][1] for t in holder.tensors}
                is_tensor = issubclass(type(holder.held), torch.Tensor)
                return {
                    key
                    for key, members in indices_by_key.items()
                    if _includes_counterparts(storages, members, sizes, all_required=is_tensor)
                }

            explained: set[object] = set()
            result = []
            for outer in ordered:
                if explained.issuperset(find_keys(outer)):
                    continue
                # If nearly all bytes of an object are in a list inside it, the list is the container that grows.
                min_bytes = MIN_PART_FRACTION * num_bytes[id(outer)]
                inner = [h for h in ordered if num_bytes[id(h)] >= min_bytes and h.tensors <= outer.tensors]
                choose = max if outermost else min
                holder = choose(inner, key=lambda other: other.depth)
                keys = find_keys(holder)
                if keys - explained:
                    explained |= keys
                    storages = {tensors[t][1] for t in holder.tensors}
                    roots = [tensors[t][0] for t in holder.tensors]
                    result.append(self._make_holder(holder, storages, roots, variables))
            return result

    @disable_garbage_collection()
    def find_holder_of_error(self, error: BaseException) -> Holder | None:
        """Return the nearest variable or container that has `error`; `storages` is empty.

        The variable may be in a frame of the error's own traceback: the two keep each other after the frame has ended.
        """
        variables = ProgramVariables(self._recorder)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if is_program(frame.f_code):
                variables.add(read_local_variables(frame), frame.f_code, None)
        holders = find_named_holders({id(error): (error, NONE)}, variables)
        nearest = min(holders, key=lambda holder: holder.depth, default=None)
        return None if nearest is None else self._make_holder(nearest, set(), [], variables)

    @disable_garbage_collection()
    def find_cycles(self, targets: Mapping[int, object]) -> list[Holder]:
        """Return the reference cycle that keeps storages in `targets`, which no holder explains, as the only item."""
        with torch.DisableTorchFunction():
            found = self._find_tensors(targets)
            oldest_first = [tensor for tensor, _ in sorted(found.values(), key=lambda pair: pair[1])]
            cycle = find_cycle(oldest_first, ProgramVariables(self._recorder).codes)
        if cycle is None:
            return []
        event, storages = len(self._recorder.trace.events), tuple(sorted(targets))
        return [Holder(event, *cycle, cycle.source is not None, None, storages, 0, 0, None)]

    @disable_garbage_collection()
    def find_garbage(self, targets: Mapping[int, object]) -> list[Holder]:
        """Return the reference cycle that keeps those storages in `targets` that the program cannot reach, and that
        Python's garbage collector will free, as the only item."""
        found = self._find_tensors(targets)
        unreachable = {id(tensor) for tensor in list_unreachable([tensor for tensor, _ in found.values()])}
        # A storage may have several tensors, such as a parameter and a view of it: one that is reached keeps it.
        reached = {index for key, (_, index) in found.items() if key not in unreachable}
        return self.find_cycles({index: targets[index] for _, index in found.values() if index not in reached})

    @disable_garbage_collection()
    def find_in_variables(self, storages: set[int]) -> set[int]:
        """Return those of `storages` that variables have, directly or indirectly, other than by a traceback."""
        tensors = self._find_tensors(dict.fromkeys(storages))
        holders = find_named_holders(tensors, ProgramVariables(self._recorder), skipped=(FrameType,))
        held = {key for holder in holders if any(name.owner is None for name in holder.names) for key in holder.tensors}
        return {tensors[key][1] for key in held}

    @disable_garbage_collection()
    def find_running_sums(self, rounds_begins: list[int] | None = None) -> list[Holder]:
        """Return the variables and attributes whose autograd graph spans several steps (`total = total + loss`); with
        `pass_begins` several micro-batches since the last step (`out, hidden = model(x, hidden)`), with `call_begins`
        several calls since the last backward."""
        begins = self._step_begins if rounds_begins is None else rounds_begins
        with torch.DisableTorchFunction():
            variables = ProgramVariables(self._recorder)
            max_nodes = _MAX_SUM_NODES
            if rounds_begins is not None:  # many of them, and looked for once
                with_graph = sum(find_node(value) is not None for _, value in variables.tensors)
                max_nodes = max(max_nodes, MAX_NODES // max(with_graph, 1))
            sums: dict[Any, tuple[NamedHolder, list[Any]]] = {}
            for name, value in variables.tensors:
                node = find_node(value)
                if node is None:
                    continue
                if node in sums:
                    sums[node][0].names.append(name)
                    continue
                nodes = collect_nodes([value], max_nodes)
                rounds = self._find_steps(nodes) if rounds_begins is None else _find_rounds(nodes, rounds_begins)
                # The graph of a sum that is updated after the optimizer's step does not include the last step.
                if min(rounds, default=2) == 1 and len(rounds) >= max(len(begins) - 1, 2):
                    sums[node] = NamedHolder(value, 0, set(), [name]), nodes
            # A state that the next step reads, and computes anew from itself; else all but values computed from sums,
            # which span as many steps, and are not what keeps the graph alive.
            carried = [holder for holder, _ in sums.values() if any(_is_carried(n, variables) for n in holder.names)]
            independent = [holder for holder, nodes in sums.values() if not any(node in sums for node in nodes[1:])]
            by_name: dict[object, NamedHolder] = {}
            for holder in carried or independent:  # what each layer has is named once
                name = holder.names[0]
                by_name.setdefault((name.code, name.owner, name.text.rpartition(".")[2]), holder)
            return [
                self._make_holder(
                    holder, {self._recorder.storages.get_index(holder.held)} - {NONE}, [holder.held], variables
                )
                for holder in by_name.values()
            ]

    def _find_tensors(self, targets: Mapping[int, object]) -> dict[int, tuple[torch.Tensor, int]]:
        """Return id -> (tensor, storage index) for all live tensor objects whose storage is in `targets`."""
        result = {}
        with torch.DisableTorchFunction():
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

    def _make_holder(
        self, found: NamedHolder, storages: set[int], roots: list[torch.Tensor], variables: ProgramVariables
    ) -> Holder:
        value = found.held
        keys = "".join(f"[{key!r}]" for key in found.keys)
        names = [dataclasses.replace(name, text=name.text + keys) for name in found.names]
        for key in found.keys:
            value = value[key]
        lines = [(name, _find_filling_line(name, variables.codes)) for name in names]
        # A caller of a function has the objects that it passes: only there they can be let go.
        own = next((name for name in names if not name.is_parameter), names[0])
        name, line = next(((name, line) for name, line in lines if line is not None), (own, None))
        if line is None and isinstance(value, _CONTAINERS):
            line = _find_line_of_parameter(name, variables)
        holder_source = line
        if is_cached := isinstance(value, functools._lru_cache_wrapper):
            holder_source, name = format_code_line(inspect.unwrap(value).__code__), HolderName(value.__name__, None)
        elif holder_source is None:
            holder_source = self._find_assigning_line(name, storages, variables)
        nodes = collect_nodes(roots, MAX_NODES)
        limit = value.cache_parameters()["maxsize"] if is_cached else getattr(value, "maxlen", None)
        holder = Holder(
            event=len(self._recorder.trace.events),
            kind="" if isinstance(value, torch.Tensor) else "lru_cache" if is_cached else type(value).__name__,
            name=name.text,
            source=holder_source,
            fills=is_cached or line is not None,
            limit=limit,
            storages=tuple(sorted(storages)),
            nodes=len(nodes),
            node_steps=len(self._find_steps(nodes)),
            batches=variables.num_loader_batches,
            has_reset=_has_reset(value, name, variables),
            # A container that the code fills is read to be filled, and of one with keys other items may be read.
            is_read_later=line is None and not found.keys and any(variables.may_read(name) for name in found.names),
            held_bytes=self._sum_held_bytes(roots) if roots else None,
            length=None if limit is None else value.cache_info().currsize if is_cached else len(value),
        )
        hook = _find_hook(value, name)
        if hook is None:
            return holder
        line = find_registering_line(hook, [*variables.codes, *variables.iterate_global_codes()])
        return holder._replace(kind=HOOK_KIND, name=hook.name, source=line, fills=line is not None)

    def _find_assigning_line(self, name: HolderName, storages: set[int], variables: ProgramVariables) -> str | None:
        """Return the line that assigns to the variable or attribute `name`: of several the one that made `storages`, or
        led there, else the last, for the first may assign None. Without one: that of its function or class, or None."""
        trace, variable = self._recorder.trace, name.text.partition("[")[0].rpartition(".")[2]
        makers = {trace.storages[index].source for index in storages} - {NONE}
        makers |= {caller.source for index in storages for caller in trace.list_callers(index)}
        made_at = {trace.sources[source] for source in makers}
        if name.code is not None:
            codes = variables.codes if name.is_global else [name.code]
            lines = next(filter(None, (list_assignment_lines(code, variable) for code in codes)), [])
            fallback: str | None = format_code_line(name.code)
        elif name.owner is not None:
            # The main part may set an attribute too, and a hook one of torch's class: `module.output = output`.
            elsewhere = list_attribute_lines([*variables.codes, *variables.iterate_global_codes()], variable)
            lines = list_attribute_lines(_list_method_codes(name.owner), variable)
            lines = lines or [line for line in elsewhere if line in made_at]
            only = elsewhere[0] if len(elsewhere) == 1 else None
            fallback = find_class_line(name.owner) if is_program_class(name.owner) else only
        else:
            return None
        return next((line for line in lines if line in made_at), lines[-1] if lines else fallback)

    def _sum_held_bytes(self, tensors: list[torch.Tensor]) -> int:
        """Return the bytes of `tensors`, of all those of one storage no more than the storage has."""
        storages, num_bytes = self._recorder.trace.storages, Counter[int]()
        for tensor in tensors:
            num_bytes[self._recorder.storages.get_index(tensor)] += tensor.numel() * tensor.element_size()
        return sum(min(held, storages[index].num_bytes) for index, held in num_bytes.items() if index != NONE)


def _find_hook(value: object, name: HolderName) -> PiledHook | None:
    """Return the hook that piles up on a part of a module, or, for the attribute of an object, which is that hook or
    has it as a method, on any module; None if none does."""
    if isinstance(value, nn.Module):
        return find_piled_hook(value.modules())
    if name.owner is None:
        return None
    modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
    return find_piled_hook(modules, name.owner)


def _has_reset(value: object, name: HolderName, variables: ProgramVariables) -> bool:
    """Return whether a container, or the object whose attribute it is, has a method `reset`, and the functions that
    are running call none."""
    has_method = any(callable(getattr(kind, "reset", None)) for kind in (type(value), name.owner))
    return has_method and all(find_line(code, r"\.reset\(") is None for code in variables.codes)


def _find_rounds(nodes: list[Any], begins: list[int]) -> set[int]:
    """Return the rounds (from 1), which begin at the sequence numbers `begins`, in which the `nodes` were created."""
    numbers = (node._sequence_nr() for node in nodes)
    return {bisect.bisect_right(begins, n) for n in numbers if n < _MIN_ACCUMULATE_GRAD_NUMBER} - {0}


def _includes_counterparts(
    storages: set[int], counterparts: list[int], sizes: Mapping[int, int], *, all_required: bool
) -> bool:
    """Return whether `storages` include all `counterparts` if `all_required`, else most bytes of the first (older)
    half: an operator may make small ones beside each, such as the means of a normalization."""
    if all_required:
        return storages.issuperset(counterparts)
    older = counterparts[: (len(counterparts) + 1) // 2]
    return 2 * sum(sizes[index] for index in storages.intersection(older)) > sum(sizes[index] for index in older)


def _find_filling_line(name: HolderName, running_codes: list[CodeType], *, in_place: bool = False) -> str | None:
    """Return `file:line function` of the source line that fills the holder: in the function of a variable, in the class
    of an attribute; for globals and attributes also in `running_codes`. None if there is no such line."""
    qualified_name, bracket, keys = name.text.partition("[")
    variable = qualified_name.rpartition(".")[2]
    codes = [] if name.code is None else [name.code]
    if name.owner is not None:
        codes = _list_method_codes(name.owner)
    if name.is_global or name.owner is not None:
        codes += running_codes
    parts = re.findall(r"\[[^\]]*\]", bracket + keys)
    # Also search without the last keys, since the program may use variables as keys.
    lines = (
        find_fill_line(
            code,
            variable,
            is_attribute=name.owner is not None,
            keys="".join(parts[:count]),
            is_any_key=count < len(parts),
            in_place=in_place,
        )
        for count in range(len(parts), -1, -1)
        for code in codes
    )
    return next((line for line in lines if line is not None), None)


def _find_line_of_parameter(name: HolderName, variables: ProgramVariables) -> str | None:
    """Return `file:line function` of the line that fills the container in a variable, of the functions that its own one
    calls and that have a parameter of the same name; None if there is none."""
    if name.code is None or name.owner is not None:
        return None
    called = (code for code in variables.iterate_global_codes() if code.co_name in name.code.co_names)
    parameters = (dataclasses.replace(name, code=code, is_global=False) for code in called)
    lines = (_find_filling_line(one, [], in_place=True) for one in parameters if one.is_parameter)
    return next((line for line in lines if line is not None), None)


def _is_carried(name: HolderName, variables: ProgramVariables) -> bool:
    """Return whether the program reads the value that a variable or attribute has now, to compute its next value."""
    is_read = name.owner is not None or variables.may_read(name)
    return is_read and _find_filling_line(name, variables.codes) is not None


def _list_method_codes(kind: type) -> list[CodeType]:
    """Return the code of the methods that class `kind` defines, without those that are not of the program."""
    methods = [inspect.unwrap(part) for part in vars(kind).values() if isinstance(part, types.FunctionType)]
    codes = [part.__code__ for part in methods if isinstance(part, types.FunctionType)]
    return [code for code in codes if is_program(code)]
