"""One pass of a stack of layers: which of them are run, and what is written for those that are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memprof.trace.events import NONE
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat.alike import Comparison, layout_of
from memprof.virtual.repeat.backward import Backwards, Node, RunAgain
from memprof.virtual.repeat.casts import Cast, Casts, OddError
from memprof.virtual.repeat.entries import Entries, Left
from memprof.virtual.repeat.leaves import applied_functions, ends_in_leaf
from memprof.virtual.repeat.slices import Begun, Call, From, Slice, UnknownError, write
from memprof.virtual.repeat.spies import Spies
from memprof.virtual.repeat.uses import uses_of_new
from memprof.watch.caches import tensors_in
from memprof.watch.forward import Place
from memprof.watch.modules import ModuleTracker

FEWEST = 6
"""Layers of a stack."""
MOST_BEFORE_A_LEAF = 40
"""Layers of a stack that is given a leaf. A graph is let go of from its end, each node within the one before it, and
Python puts off what is nested deeper than 50 objects (Py_TRASHCAN, Objects/object.c): what is freed then is freed
later. A node that stands for a layer is such an object, and so are autograd functions of libraries."""
_FEWEST_ALIKE = 3
"""Layers of a group of which one may be repeated."""
_LAST = 2
"""Layers of a group that are run, with gradients, for their backward."""
_BY_DEATH = frozenset({From.HELD})
_NoTorchFunction = torch._C.DisableTorchFunction
_storage_use_count = torch._C._storage_Use_Count
_forbid_data = torch._C._set_throw_on_mutable_data_ptr


@dataclass(frozen=True)
class _Result:
    """What a layer returns: one tensor in new memory, alone or in a list, and nothing else."""

    form: Any
    """With None in its place; None: it is returned alone."""
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    requires_grad: bool
    storage: int
    """The number, of those that the layer made, of the tensor's."""
    is_all: bool
    """Whether a layer that returns this can be repeated: nothing is known of its elements, and without a graph nothing
    else outlives the layer but what it leaves in a cache, as the workspace does that the first one takes."""

    def make(self) -> torch.Tensor:
        """Such a tensor."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        if made.untyped_storage().nbytes() != self.num_bytes:
            raise RunAgain("a layer's result is part of more")
        return made

    def around(self, tensor: torch.Tensor) -> Any:
        """What is returned with this tensor."""
        if self.form is None:
            return tensor
        parts = list(self.form)
        parts[self.place] = tensor
        return type(self.form)(parts)


@dataclass
class _Done:
    """A layer that was run. Equal to another if that one did the same."""

    given: Any
    result: _Result
    slice: Slice
    casts: tuple[Cast, ...]
    left: Left
    """In its entry in a cache."""
    keeps_input: bool | None = None
    """Whether its graph does; known when the next layer is called."""
    call: Call = field(compare=False, kw_only=True)
    place: int = field(compare=False, kw_only=True)
    is_clean: bool = field(compare=False, kw_only=True)
    """Whether it did nothing beside what its slice says."""


@dataclass(eq=False)
class _Group:
    """Layers of a stack that are alike."""

    places: list[int]
    last: list[_Done] = field(default_factory=list)
    """The two that were run last."""
    pattern: _Done | None = None
    """What is repeated."""
    backward: Any = None
    """What is repeated of their backward."""
    backwards: list[Any] = field(default_factory=list)
    """Those that were run last."""


class Pass:
    """One forward through a stack, and its backward.

    Args:
        machine: it runs on this.
        modules: knows the run's modules.
        assumptions: how many there are.
        root: the model.
        members: the layers of the stack.
        trained_between: whether anything outside the model's stacks is trained.
        spies: of the run.
    """

    def __init__(
        self,
        machine: RecordingMode,
        modules: ModuleTracker,
        assumptions: Callable[[], int],
        root: nn.Module,
        members: list[nn.Module],
        trained_between: Callable[[], bool],
        spies: Spies,
    ) -> None:
        self._machine = machine
        self._assumptions = assumptions
        self._trained_between = trained_between
        self._spies = spies
        self._next = 0
        self._is_on = True
        self._has_grad = torch.is_grad_enabled()
        self._comparison = Comparison(machine.values, root)
        self._layers = [weakref.ref(member) for member in members]
        self._ranges = [modules.below_and(member) for member in members]
        self._groups: list[_Group] = []
        """By the layers' places."""
        self._before: _Done | None = None
        """The layer before, if it was run."""
        self._output = NONE
        """What the layer before has returned."""
        self._given_with_graph: list[torch.Tensor] = []
        """What the first layer is given that needs a gradient, until that is looked into."""
        self._is_given_leaf = False
        """Whether the first layer is given a tensor that only the graph holds, and at its very end."""
        self._casts = Casts(machine)
        self._entries = Entries(machine, spies)
        self._backwards = Backwards(
            machine, assumptions, self._layers, lambda one, other: self._are_alike(one, other, numbers=True)
        )

    @property
    def owes(self) -> bool:
        """Whether a layer that was repeated forward is yet to be repeated backward, or was not what was thought."""
        return bool(self._backwards.owed) or self._casts.is_wrong

    @property
    def is_in_backward(self) -> bool:
        """Whether the backward of a layer is being run."""
        return self._backwards.is_open

    def stop(self) -> None:
        """From here on every layer of this pass is run."""
        self._is_on = False

    def called(
        self, place: int, original: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, bool]:
        """What a layer returns, and whether it was repeated.

        Raises:
            RunAgain: what was repeated so far was not right.
        """
        if self._is_on and (place != self._next or torch.is_grad_enabled() != self._has_grad):
            if self.owes:
                raise RunAgain("layers are called in another order")
            self.stop()
        self._next = place + 1
        if not self._is_on:
            return original(layer, *args, **kwargs), False
        try:
            return self._run_or_repeated(place, original, layer, args, kwargs)
        finally:
            self._entries.forget()

    def _run_or_repeated(
        self, place: int, original: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, bool]:
        given, pattern = self._told(place, args, kwargs)
        if not self._is_on:
            return original(layer, *args, **kwargs), False
        if pattern is not None and self._machine.values.has_room(pattern.slice.paid, pattern.slice.held[1]):
            with _NoTorchFunction():
                return self._repeat(pattern, place, _hidden(self._output, self._machine, (args, kwargs))), True
        return self._run(place, given, original, layer, args, kwargs), False

    def _told(self, place: int, args: Any, kwargs: Any) -> tuple[Any, _Done | None]:
        """What the layer at `place` is given, to be compared; and what is repeated for it, if anything is."""
        with _NoTorchFunction():
            if self._before is not None:
                self._before.keeps_input = self._machine.recorder.is_alive(self._before.call.input)
                self._before = None
            try:
                given = self._given(place, (args, kwargs))
            except OddError:
                self._given_with_graph.clear()
                self.stop()
                return None, None
            if place == 0:
                self._groups = self._grouped()
                made, self._given_with_graph = self._given_with_graph, []
                if all(len(group.places) < _FEWEST_ALIKE for group in self._groups):
                    self.stop()
                    return None, None
                self._is_given_leaf = any(ends_in_leaf(one, self._trained_between) for one in made)
            group = self._groups[place]
            pattern = self._pattern(group, place)
            if pattern is None or given != pattern.given or place not in self._repeatable(group, pattern):
                return given, None
            return given, pattern

    # -- which layers are alike -------------------------------------------------------------------------------------

    def _grouped(self) -> list[_Group]:
        """For each place the group of its layer."""
        kinds: list[_Group] = []
        groups = []
        for place in range(len(self._layers)):
            group = next((one for one in kinds if self._are_alike(one.places[0], place, numbers=False)), None)
            if group is None:
                group = _Group([])
                kinds.append(group)
            group.places.append(place)
            groups.append(group)
        return groups

    def _are_alike(self, one: int, other: int, *, numbers: bool) -> bool:
        pair = self._layers[one](), self._layers[other]()
        if pair[0] is None or pair[1] is None or len(self._ranges[one]) != len(self._ranges[other]):
            return False
        with _disable_current_modes():
            return self._comparison.is_alike((pair[0], one), (pair[1], other), numbers=numbers)

    def _pattern(self, group: _Group, place: int) -> _Done | None:
        """What is repeated for the layer at `place`, if anything is."""
        if group.pattern is None and len(group.last) == 2:
            before, last = group.last
            same = before == last and last.is_clean and last.keeps_input is not None
            # That they left nothing in themselves, too.
            if same and all(self._are_alike(one.place, place, numbers=False) for one in group.last):
                group.pattern = last
        pattern = group.pattern
        # What was done may have depended on numbers: then they must be the same.
        if pattern is not None and pattern.slice.looks and not self._are_alike(pattern.place, place, numbers=True):
            return None
        return pattern

    def _repeatable(self, group: _Group, pattern: _Done) -> list[int]:
        """Places of the layers that need not be run."""
        return group.places[:-_LAST] if pattern.result.requires_grad else group.places

    # -- what they are given and return -----------------------------------------------------------------------------

    def _given(self, place: int, given: Any) -> Any:
        """What a layer is given, to be compared: the result of the one before it, and what all are given.

        Raises:
            OddError: more than is looked into.
        """
        met = [0]
        described = self._described(given, met)
        if place and met[0] != 1:
            raise OddError
        return described, self._casts.setting()

    def _described(self, value: Any, met: list[int]) -> Any:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            index = self._machine.recorder.index_of(value)
            if kind not in (torch.Tensor, nn.Parameter) or not value.is_meta or index == NONE:
                raise OddError
            if index == self._output:
                met[0] += 1
                if vars(value):
                    raise OddError
                if self._machine.values.knows(value.untyped_storage()._cdata):
                    return object()  # what is done may depend on it: like nothing else
                return "hidden", layout_of(value)[1:6], value.requires_grad
            if value.requires_grad and self._has_grad:
                if self._next > 1:
                    raise OddError
                self._given_with_graph.append(value)
            return index, layout_of(value), value._version
        if kind in (tuple, list):
            return kind, [self._described(part, met) for part in value]
        if kind is dict:
            return list(value), [self._described(part, met) for part in value.values()]
        if value is None or kind in (bool, int, float, str, torch.dtype):
            return kind, value
        if self._has_grad:
            raise OddError
        return self._entries.described(value, self._next - 1, self._output)

    def _result(self, result: Any, call: Call, made: Slice, left: Left) -> _Result:
        """What a layer returned.

        Raises:
            OddError: more than is looked into.
        """
        form, place = (list(result), 0) if type(result) in (tuple, list) else ([result], 0)
        tensors = [at for at, part in enumerate(form) if isinstance(part, torch.Tensor)]
        plain = all(
            part is None or type(part) in (bool, int, float, str) for at, part in enumerate(form) if at not in tensors
        )
        if len(tensors) != 1 or not plain:
            raise OddError
        place = tensors[0]
        tensor, form[place] = form[place], None
        storage = tensor.untyped_storage()
        number = self._machine.recorder.index_of(tensor) - call.first_storage
        if (
            type(tensor) is not torch.Tensor
            or vars(tensor)
            or not tensor.is_meta
            or not 0 <= number < call.storages
            or tensor._backward_hooks
            or tensor.storage_offset()
            or (tensor.requires_grad and (tensor.output_nr or not self._has_grad))
            # What keeps it beside the program would be its own graph.
            or _storage_use_count(storage._cdata) > uses_of_new()
            or number not in made.alive
        ):
            raise OddError
        whole = type(result)(form) if isinstance(result, (tuple, list)) else None
        return _Result(
            whole, place, tensor.size(), tensor.stride(), tensor.dtype, storage.nbytes(), tensor.requires_grad, number,
            not self._machine.values.knows(storage._cdata)
            and (tensor.requires_grad or set(made.alive) == {number, *left.storages}),
        )  # fmt: skip

    # -- run, or repeat ---------------------------------------------------------------------------------------------

    def _run(
        self, place: int, given: Any, original: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        recorder, group = self._machine.recorder, self._groups[place]
        call = Call(self._ranges[place], self._output, held=self._entries.held)
        begun = Begun(self._machine, self._assumptions)
        call.first_event, call.first_storage = begun.first_event, begun.first_storage
        casts = self._casts.begin()
        watched: AbstractContextManager[list[type]] = nullcontext([])
        if self._is_given_leaf and not place:
            watched = applied_functions()
        numbers = self._comparison.numbers if len(group.places) > 1 else set()
        with watched as applied, self._spies.posted(layer, numbers) as is_used, self._entries.watched() as is_seen:
            try:
                result = original(layer, *args, **kwargs)
            except Exception as error:
                if self._comparison.numbers or self._entries.is_given:
                    raise RunAgain("a layer failed while its number was watched") from error
                raise
        with _NoTorchFunction():
            call.events = len(recorder.trace.events) - call.first_event
            call.storages = len(recorder.trace.storages) - call.first_storage
            try:
                made, is_clean = begun.end(call)
                left = self._entries.end(call)
                returned = self._result(result, call, made, left)
                cast = self._casts.end(casts, layer, call) if place else ()
            except (UnknownError, OddError):
                group.last.clear()
                self._output = NONE
                self.stop()
                return result
            self._output = call.first_storage + returned.storage
            if place and not is_used() and not is_seen() and returned.is_all:
                done = _Done(given, returned, made, cast, left, call=call, place=place, is_clean=is_clean)
                group.last = [*group.last[-1:], done]
                self._before = done
            if returned.requires_grad:
                call.output = self._output
                passing = {one.storage for one in cast if not one.is_kept}
                call.kept = frozenset(made.alive) - {returned.storage} - passing
                if self._is_given_leaf and (applied or len(self._layers) > MOST_BEFORE_A_LEAF):
                    self.stop()
                self._backwards.run(place, group, call, _one_tensor(result))
        return result

    def _repeat(self, pattern: _Done, place: int, hidden: torch.Tensor) -> Any:
        """What the layer at `place` would return, when it is written what it would do."""
        machine, result = self._machine, pattern.result
        recorder = machine.recorder
        call = Call(
            self._ranges[place], self._output, first_event=len(recorder.trace.events), events=pattern.call.events,
            first_storage=len(recorder.trace.storages), storages=pattern.call.storages, held=self._entries.held,
        )  # fmt: skip
        try:
            base = write(pattern.slice, machine, call, by_death=_BY_DEATH, let_go=self._entries.let_go)
        except UnknownError as error:
            raise RunAgain(str(error)) from None
        self._output = call.output = base + result.storage
        with _disable_current_modes():
            if result.requires_grad:
                node = self._backwards.repeat(place, self._groups[place], call, hidden if pattern.keeps_input else None)
                tensor = Node.apply(hidden, node, result.make)
            else:
                tensor = result.make()
            self._entries.repeat(pattern.left, base)
            layer = self._layers[place]()
            if pattern.casts and layer is not None:
                self._casts.repeat(pattern.casts, pattern.call, layer, base)
        _forbid_data(tensor)
        recorder.attach(tensor.untyped_storage(), self._output)
        if pattern.slice.first_place is not None:
            (inside, module), source, event = pattern.slice.first_place
            module = module + call.modules.start if inside else module
            recorder.note_repeated(Place(module, source, call.first_event + event))
        return result.around(tensor)


def _one_tensor(result: Any) -> torch.Tensor:
    return (
        result if isinstance(result, torch.Tensor) else next(part for part in result if isinstance(part, torch.Tensor))
    )


def _hidden(index: int, machine: RecordingMode, value: Any) -> torch.Tensor:
    """The tensor in `value` that is storage number `index`."""
    found = [tensor for tensor in tensors_in(value) if machine.recorder.index_of(tensor) == index]
    return found[0]
