"""What one layer did, written down so that another layer's can be compared with it, and be written in its place.

A *slice* is what a forward or a backward of one layer adds to the trace: events, storages, workspaces, work. In it a
storage goes by where it comes from, and a module by its place in the layer.
"""

from __future__ import annotations

import bisect
import enum
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memprof.trace.events import NONE, Event, EventKind, Storage, Workspace
from memprof.virtual.recording import RecordingMode

_new: Any = tuple.__new__
_ALLOC, _FREE, _ENTER, _EXIT = EventKind.ALLOC, EventKind.FREE, EventKind.ENTER, EventKind.EXIT


class From(enum.IntEnum):
    """Where what an event is about comes from, as seen from the layer."""

    HERE = 0  # a storage: the n-th that the slice makes
    MODULE = 1  # a module: its place in the layer
    FORWARD = 2  # a storage: the n-th of the layer's forward, in its backward; of the round before, in a loop
    INPUT = 3  # the layer's input
    ARRIVED = 4  # in a backward, the gradient of the layer's output
    GRADIENT = 5  # in a backward, what the n-th parameter's gradient was before
    HELD = 6  # a storage: the n-th that the layer's entry in a cache had before


def _drawn() -> bytes:
    """The state of torch's own generator."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return torch.default_generator.get_state().numpy().tobytes()


class UnknownError(Exception):
    """A layer does something that is not understood well enough to repeat it."""


@dataclass
class Call:
    """One call of a layer in a forward, and its backward: indices in the trace."""

    modules: range
    """Of the layer and what is in it."""
    input: int
    """The storage that it is given..."""
    output: int = NONE
    """... and the one that it returns."""
    first_event: int = 0
    events: int = 0
    first_storage: int = 0
    storages: int = 0
    """Of the forward: how many."""
    kept: frozenset[int] = frozenset()
    """Numbers of those that outlive it, but for the result's: its graph keeps them."""
    held: tuple[int, ...] = ()
    """What the layer's entry in a cache has before."""


@dataclass
class Slice:
    """What a layer did, in words that hold for any layer like it."""

    events: list[tuple[EventKind, From, int]]
    storages: list[tuple[Any, ...]]
    workspaces: list[tuple[Any, ...]]
    work: dict[int, int]
    paid: int
    """Work of computing values."""
    looks: int
    """How often numbers that are known were looked at."""
    alive: tuple[int, ...]
    """Which storages that it made outlive it."""
    held: tuple[int, int] = field(compare=False, default=(0, 0))
    """Bytes of values that are held more than before, and were at most. Those of what died unseen are given up when its
    address is taken anew, by chance here or in another layer."""
    first_place: tuple[tuple[bool, int], int, int] | None = None
    """Of the first operator: module as seen from the layer, source, and the event in the slice before which it ran."""
    joined: tuple[tuple[int, int], ...] = ()
    """What was joined to new of what the layer's entry in a cache had before, and the storages that were made then."""
    lets_go: bool = field(compare=False, default=False)
    """Of a backward: whether it was the last to hold what was made before its layer ran, which is freed and not in
    `events`. The first layers of a group hold all that is given to every one of it, and are never repeated."""


class Begun:
    """A slice that has begun.

    Args:
        machine: it runs on this.
        assumptions: how many there are.
    """

    def __init__(self, machine: RecordingMode, assumptions: Callable[[], int]) -> None:
        self._machine = machine
        self._assumptions = assumptions
        trace = machine.recorder.trace
        self.first_event, self.first_storage = len(trace.events), len(trace.storages)
        self._workspaces = len(trace.workspaces)
        self._work = machine.meter.tally()
        self._values = machine.values.begin_slice()
        self._looks = machine.values.looks
        self._notes = machine.recorder.notes()
        self._joined = len(machine.caches.joined())
        self._state = self._side_effects()

    def _side_effects(self) -> tuple[Any, ...]:
        """What changes if something is done that no event shows."""
        machine = self._machine
        trace = machine.recorder.trace
        return (
            len(trace.modules), len(trace.mismatches), len(trace.uses), len(trace.waits), len(trace.refused),
            len(trace.owners), len(trace.ops), len(trace.sources), len(trace.phases), len(machine.kept),
            machine.values.draws, machine.caches.changes, self._assumptions(), machine.recorder.phase_index,
            trace.compiling, random.getstate(), _drawn(),
        )  # fmt: skip

    def end(
        self,
        call: Call,
        *,
        arrived: int = NONE,
        gradients: dict[int, int] | None = None,
        in_loop: bool = False,
    ) -> tuple[Slice, bool]:
        """The slice, and whether it did nothing but what it says.

        Args:
            call: the call that it is of; of a backward, its forward; of a round of a loop, the round before.
            arrived: of a backward, the storage of the gradient that arrived.
            gradients: of a backward, storage -> number of the parameter whose gradient it was before.
            in_loop: it is a round of a loop.

        Raises:
            UnknownError: it cannot be said in such words.
        """
        machine = self._machine
        trace = machine.recorder.trace
        first, base = self.first_event, self.first_storage
        in_backward = gradients is not None
        has_before = in_backward or in_loop
        of_forward = range(call.first_storage, call.first_storage + call.storages) if has_before else range(0)
        events: list[tuple[EventKind, From, int]] = []
        others: list[int] = []
        alive = dict.fromkeys(range(len(trace.storages) - base))
        for at, (kind, ref) in enumerate(trace.events[first:], first):
            if kind is _ALLOC:
                events.append((kind, From.HERE, ref - base))
            elif kind is _FREE:
                if ref >= base:
                    events.append((kind, From.HERE, ref - base))
                    del alive[ref - base]
                elif ref == arrived:
                    events.append((kind, From.ARRIVED, 0))
                elif ref in call.held:
                    events.append((kind, From.HELD, call.held.index(ref)))
                elif ref == call.input:
                    events.append((kind, From.INPUT, 0))
                elif ref in of_forward:
                    events.append((kind, From.FORWARD, ref - call.first_storage))
                elif in_backward and ref in gradients:  # type: ignore[operator]
                    events.append((kind, From.GRADIENT, gradients[ref]))  # type: ignore[index]
                elif in_backward and ref < call.first_storage:
                    others.append(at)
                else:
                    raise UnknownError("frees what is not its own")
            elif kind in (_ENTER, _EXIT) and ref in call.modules:
                events.append((kind, From.MODULE, ref - call.modules.start))
            else:
                raise UnknownError(f"{kind.name} within a layer")
        phase = machine.recorder.phase_index

        def moment(event: int) -> int:
            """Since the slice began, without what is not its own."""
            return event - first - bisect.bisect_left(others, event)

        storages = []
        for storage in trace.storages[base:]:
            if storage.phase != phase:
                raise UnknownError("phases change within a layer")
            storages.append(
                (
                    *storage[:5],
                    _inside(storage.module, call.modules),
                    storage.source,
                    _moment(storage.forward_event, call, first, moment, anywhere=in_loop),
                    storage.hidden,
                )
            )
        workspaces = [(moment(one.event), *one[1:]) for one in trace.workspaces[self._workspaces :]]
        paid, held, rise = machine.values.end_slice(self._values)
        place = machine.recorder.note_after(self._notes)
        looks = machine.values.looks - self._looks
        joined = machine.caches.joined(self._joined)
        is_own = all(old in call.held for old, _ in joined)
        first_place = None
        if place is not None:
            first_place = _inside(place.module, call.modules), place.source, moment(place.forward_event)
        made = Slice(
            events, storages, workspaces, machine.meter.since(self._work), paid, looks, tuple(alive), (held, rise),
            first_place, tuple((call.held.index(old), before - base) for old, before in joined if is_own),
            bool(others),
        )  # fmt: skip
        return made, is_own and self._side_effects() == self._state


def _inside(module: int, modules: range) -> tuple[bool, int]:
    """A module as seen from a layer: whether it is in it, and its place there or in the trace."""
    return (True, module - modules.start) if module in modules else (False, module)


def _moment(event: int, call: Call, first: int, moment: Callable[[int], int], *, anywhere: bool) -> tuple[int, int]:
    """When an operator ran forward: in the slice itself (recomputed), in the layer's forward, or never.

    `anywhere`: or at one moment that all have in common.
    """
    if event == NONE:
        return 0, NONE
    if event >= first:
        return 1, moment(event)
    if call.first_event <= event <= call.first_event + call.events:
        return 2, event - call.first_event
    if anywhere:
        return 0, event
    raise UnknownError("differentiates what ran outside the layer")


def write(
    made: Slice,
    machine: RecordingMode,
    call: Call,
    *,
    arrived: int = NONE,
    by_death: frozenset[From] = frozenset(),
    let_go: Callable[[From, int], None] = lambda origin, number: None,
) -> int:
    """Append to the trace what `call` does, which is like the one that `made` is of; returns its first storage.

    Args:
        made: what is done.
        machine: it is written into its trace.
        call: the call that it is of; of a forward, it is told where that is.
        arrived: of a backward, the storage of the gradient that arrived.
        by_death: of what is freed, that which there is a tensor of: its end is seen when that dies.
        let_go: lets go of such a tensor.

    Raises:
        UnknownError: values would not be computed here that were computed there.
    """
    recorder = machine.recorder
    trace = recorder.trace
    if not machine.values.repeat(made.paid, *made.held):
        raise UnknownError("too many values are computed")
    machine.meter.repeat(made.work)
    first, base, phase, rows = len(trace.events), len(trace.storages), recorder.phase_index, trace.storages
    modules = call.modules.start
    moments = (0, first, call.first_event)
    for num_bytes, shape, dtype, device, op, (inside, module), source, (kind, moment), hidden in made.storages:
        module = module + modules if inside else module
        moment += moments[kind]
        rows.append(_new(Storage, (num_bytes, shape, dtype, device, op, module, source, phase, moment, hidden)))
    starts = (base, modules, call.first_storage, call.input, arrived, 0)
    append = trace.events.append
    for kind, origin, number in made.events:
        if origin in by_death:
            let_go(origin, number)
            continue
        ref = number + starts[origin]
        append(_new(Event, (kind, ref)))
        if kind is _ALLOC:
            recorder.count(rows[ref])
        elif kind is _FREE:
            recorder.discount(rows[ref])
    trace.workspaces.extend(Workspace(event + first, *rest) for event, *rest in made.workspaces)
    machine.caches.join_again((call.held[number], before + base) for number, before in made.joined)
    return base
