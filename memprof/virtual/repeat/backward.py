"""The backward of layers that were not run: what the last two did that were.

A layer that was repeated has one autograd node (`Node`). When its gradient arrives, what the backward of another layer
did is written; the gradients of its parameters are put where the engine would put them, and that of its input is handed
on. Where a layer's backward begins and ends is seen at the node of its result, by whose gradient it begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memprof.trace.events import NONE, Event, EventKind
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat.slices import Begun, Call, From, Slice, UnknownError, write

_NoTorchFunction = torch._C.DisableTorchFunction
_forbid_data = torch._C._set_throw_on_mutable_data_ptr
_BY_DEATH = frozenset({From.INPUT, From.GRADIENT})
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, int]
"""Size, stride and dtype of a tensor at the begin of its memory, and the bytes of that."""
Memory = tuple[From, int]
"""The n-th storage that the layer's backward makes; or its forward, whose code has the backward use it again."""


class RunAgain(BaseException):
    """What was repeated was not right, or cannot be told to be: the run is to be made again without repeating."""


@dataclass
class Backward:
    """What the backward of one layer did."""

    slice: Slice
    arrived: Layout
    gradients: list[tuple[Layout | None, Layout | Memory | None]]
    """Of each parameter before and after; a memory: what it is made in, whose layout is in `made`."""
    made: dict[Memory, Layout]
    handed_on: Memory | None
    """Where the input's gradient is; None: in the memory of the one that arrived."""
    layout: Layout
    """Of the input's gradient."""
    place: int = field(compare=False)


@dataclass(eq=False)
class Repeated:
    """A layer that was repeated forward."""

    place: int
    call: Call
    kept: torch.Tensor | None
    """Its input, if the graph of such a layer keeps it."""
    backwards: Backwards

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """The gradient of its input."""
        return self.backwards.repeated(self, gradient)


class Node(torch.autograd.Function):
    """A layer that was repeated, in the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: Repeated, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Its result."""
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        """The gradient of its input, the first argument of `forward`."""
        return ctx.layer.backward(gradient), None, None


@dataclass(eq=False)
class _Open:
    """A backward of a layer that is being run."""

    place: int
    begun: Begun
    arrived: int
    layout: Layout
    before: list[tuple[int, Layout | None]]


class Backwards:
    """The backward of one pass.

    Args:
        machine: it runs on this.
        assumptions: how many there are.
        layers: of the stack.
        same_numbers: whether what is known of the numbers in two layers' weights is the same.
    """

    def __init__(
        self,
        machine: RecordingMode,
        assumptions: Callable[[], int],
        layers: list[weakref.ref[nn.Module]],
        same_numbers: Callable[[int, int], bool],
    ) -> None:
        self._machine = machine
        self._assumptions = assumptions
        self._layers = layers
        self._same_numbers = same_numbers
        self._groups: dict[int, Any] = {}
        self._calls: dict[int, Call] = {}
        self.owed: set[int] = set()
        """Places of the layers that were repeated forward."""
        self._open: _Open | None = None
        self._expected: tuple[int, int, int] | None = None
        """Which layer is next, the events before it, and the storage of the gradient that arrives there."""
        self._dying: list[Callable[[], object]] = []
        """What was written to be free, and is held by the engine until the node has run."""
        self._repeats = False

    @property
    def is_open(self) -> bool:
        """Whether the backward of a layer is being run."""
        return self._open is not None

    def run(self, place: int, group: Any, call: Call, result: torch.Tensor) -> None:
        """A layer was run, and has returned this."""
        self._groups[place], self._calls[place] = group, call
        node = result.grad_fn
        assert node is not None
        node.register_prehook(lambda gradients: self._arrives(place, gradients))

    def repeat(self, place: int, group: Any, call: Call, kept: torch.Tensor | None) -> Repeated:
        """A layer is repeated."""
        self._groups[place], self._calls[place] = group, call
        self.owed.add(place)
        self._repeats = True
        return Repeated(place, call, kept, self)

    # -- where one layer's ends and the next one's begins -----------------------------------------------------------

    def _arrives(self, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """The gradient of a layer's result is there, and the node that made it is about to run."""
        if not self._repeats:
            return
        with _NoTorchFunction():
            gradient = gradients[0]
            if len(gradients) != 1 or gradient is None:
                raise RunAgain("a layer's result has no gradient")
            index, layout = self._next(place, gradient)
            if place:
                begun = Begun(self._machine, self._assumptions)
                self._open = _Open(place, begun, index, layout, self._gradients(place))

    def _next(self, place: int, gradient: torch.Tensor) -> tuple[int, Layout]:
        """The backward of the layer before is over, if one was."""
        recorder = self._machine.recorder
        index, layout = recorder.index_of(gradient), self._layout(gradient)
        if index == NONE or torch.is_grad_enabled():
            raise RunAgain("a gradient is not known, or has one")
        opened, self._open = self._open, None
        expected, self._expected = self._expected, None
        if opened is not None:
            if opened.place != place + 1:
                raise RunAgain("layers are differentiated in another order")
            self._close(opened, index, layout)
        elif expected is not None:
            if expected != (place, len(recorder.trace.events), index):
                raise RunAgain("something happened between two layers")
            if any(ref() is not None for ref in self._dying):
                raise RunAgain("a gradient is kept")
            self._dying.clear()
        elif place + 1 in self._calls:
            raise RunAgain("layers are differentiated in another order")
        return index, layout

    def _close(self, opened: _Open, handed_on: int, layout: Layout) -> None:
        """A layer's backward was run, and has made this gradient of its input."""
        group = self._groups[opened.place]
        done = None
        try:
            done, is_clean = self._backward(opened, handed_on, layout)
        except UnknownError as error:
            is_clean, why = False, str(error)
        pattern = group.backward
        if pattern is None:
            group.backwards = [*group.backwards[-1:], (done, is_clean)]
        elif (
            done is None or done != pattern or not is_clean or (done.slice.lets_go and opened.place != group.places[0])
        ):
            raise RunAgain("a layer's backward is another than those that were repeated" + ("" if done else f": {why}"))

    def _backward(self, opened: _Open, handed_on: int, layout: Layout) -> tuple[Backward, bool]:
        call = self._calls[opened.place]
        indices = [index for index, _ in opened.before]
        numbers = {index: number for number, index in enumerate(indices) if index != NONE}
        made, is_clean = opened.begun.end(call, arrived=opened.arrived, gradients=numbers)
        base = opened.begun.first_storage

        def memory(index: int) -> Memory:
            if index >= base:
                return From.HERE, index - base
            if index - call.first_storage in call.kept:
                return From.FORWARD, index - call.first_storage
            raise UnknownError("a gradient is in memory that was there before")

        gradients: list[tuple[Layout | None, Layout | Memory | None]] = []
        new: dict[Memory, Layout] = {}
        for (index, before), (now, after) in zip(opened.before, self._gradients(opened.place), strict=True):
            if now == index:
                gradients.append((before, after))
                continue
            where = memory(now)
            if after is None or where in new:
                raise UnknownError("a parameter has another's gradient")
            new[where] = after
            gradients.append((before, where))
        freed = {number for kind, origin, number in made.events if kind is EventKind.FREE and origin is From.FORWARD}
        at = None if handed_on == opened.arrived else memory(handed_on)
        left = set(new) | ({at} if at is not None else set())
        if at in new or {number for origin, number in left if origin is From.HERE} != set(made.alive):
            raise UnknownError("a backward leaves more than gradients")
        kept = {number for origin, number in left if origin is From.FORWARD}
        if kept & freed or not call.kept <= freed | kept:
            raise UnknownError("a graph keeps what it was made for")
        if (at is None) == any(origin is From.ARRIVED for _, origin, _ in made.events):
            raise UnknownError("a gradient is kept")
        return Backward(made, opened.layout, gradients, new, at, layout, opened.place), is_clean

    def _gradients(self, place: int, parameters: list[nn.Parameter] | None = None) -> list[tuple[int, Layout | None]]:
        """Storage and layout of each parameter's gradient."""
        return [
            (NONE, None) if parameter.grad is None else (self._known(parameter.grad), self._layout(parameter.grad))
            for parameter in parameters or self._parameters(place)
        ]

    def _known(self, tensor: torch.Tensor) -> int:
        index = self._machine.recorder.index_of(tensor)
        if index == NONE:
            raise RunAgain("a gradient is not known")
        return index

    def _parameters(self, place: int) -> list[nn.Parameter]:
        layer = self._layers[place]()
        if layer is None:
            raise RunAgain("a layer is gone")
        return list(layer.parameters())

    def _layout(self, tensor: torch.Tensor) -> Layout:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.storage_offset():
            raise RunAgain("a gradient is no ordinary tensor")
        return tensor.size(), tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()

    # -- repeated ---------------------------------------------------------------------------------------------------

    def repeated(self, layer: Repeated, gradient: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the input of a layer that was repeated.

        Raises:
            RunAgain: the layers that were run do not tell what it does.
        """
        with _NoTorchFunction(), _disable_current_modes():
            if layer.place not in self.owed or gradient is None:
                raise RunAgain("a layer's result has no gradient, or twice")
            arrived, layout = self._next(layer.place, gradient)
            pattern = self._pattern(self._groups[layer.place])
            parameters = self._parameters(layer.place)
            before = [one for _, one in self._gradients(layer.place, parameters)]
            if pattern is None or layout != pattern.arrived or before != [one for one, _ in pattern.gradients]:
                raise RunAgain("the layers that were run do not tell what this one does")
            if pattern.slice.looks and not self._same_numbers(pattern.place, layer.place):
                raise RunAgain("what is done may depend on numbers that differ")
            self.owed.discard(layer.place)
            recorder = self._machine.recorder
            if pattern.handed_on is not None:
                self._dying.append(recorder.detach(arrived))
            let_go = self._letting_go(layer, parameters)
            try:
                base = write(
                    pattern.slice, self._machine, layer.call, arrived=arrived, by_death=_BY_DEATH, let_go=let_go
                )
            except UnknownError as error:
                raise RunAgain(str(error)) from None
            events = len(recorder.trace.events)
            layer.kept = None  # where the others' is held on to by somebody else
            starts = {From.HERE: base, From.FORWARD: layer.call.first_storage}
            for parameter, (_, after) in zip(parameters, pattern.gradients, strict=True):
                if after in pattern.made:
                    parameter.grad = self._made(pattern.made[after], starts[after[0]] + after[1])
            if pattern.handed_on is not None:
                arrived = starts[pattern.handed_on[0]] + pattern.handed_on[1]
                gradient = self._made(pattern.layout, arrived)
            if len(recorder.trace.events) != events:
                raise RunAgain("a tensor died that others keep")
            self._expected = layer.place - 1, events, arrived
            return gradient

    def _pattern(self, group: Any) -> Backward | None:
        if group.backward is None and len(group.backwards) == 2:
            (one, _), (other, is_clean) = group.backwards
            if one is not None and one == other and is_clean and not (one.slice.lets_go or other.slice.lets_go):
                group.backward = one
        return group.backward

    def _letting_go(self, layer: Repeated, parameters: list[nn.Parameter]) -> Callable[[From, int], None]:
        """What lets go of the layer's input or a parameter's gradient, by which it dies."""
        recorder = self._machine.recorder

        def let_go(origin: From, number: int) -> None:
            if origin is From.INPUT:
                index, layer.kept = layer.call.input, None
            else:
                gradient = parameters[number].grad
                index = NONE if gradient is None else recorder.index_of(gradient)
                del gradient
                parameters[number].grad = None
            if recorder.trace.events[-1] != Event(EventKind.FREE, index):
                raise RunAgain("a tensor is kept that others let go of")

        return let_go

    def _made(self, layout: Layout, index: int) -> torch.Tensor:
        """A tensor that stands for storage number `index`, which was written."""
        size, stride, dtype, num_bytes = layout
        made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if made.untyped_storage().nbytes() != num_bytes:
            raise RunAgain("a gradient is part of more")
        _forbid_data(made)
        self._machine.recorder.attach(made.untyped_storage(), index)
        return made
