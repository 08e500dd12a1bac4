"""Rounds of a loop, of which a few are run and what they did is written for the others.

A round is like a layer that is given nothing and returns nothing: what it makes dies in it, or in the next one, where
the loop's variables are set anew. The first round is another than those that follow. When two behind each other do the
same, that is written for all but the last of their length, which is run, and must turn out to do it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from memprof.trace.events import NONE, EventKind
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat.backward import RunAgain
from memprof.virtual.repeat.slices import Begun, Call, From, Slice, UnknownError, write

FEWEST = 6
"""Rounds of a loop."""
_TRIED = 5
"""Rounds after which, if no two were the same, all are run."""


@dataclass(frozen=True)
class _Done:
    """A round that was run."""

    call: Call
    """Its events and storages in the trace."""
    slice: Slice | None
    """What it did; None: what is not understood well enough to write it."""


def run(
    parts: Sequence[slice], machine: RecordingMode, assumptions: Callable[[], int], written: Callable[[int], None]
) -> Iterator[slice]:
    """Those of `parts` whose rounds are to be run.

    Args:
        parts: of what is looped over.
        machine: it runs on this.
        assumptions: how many there are.
        written: told how many rounds were written.

    Raises:
        RunAgain: what was written was not right.
    """
    alike = next((at for at, part in enumerate(parts) if _length(part) != _length(parts[0])), len(parts))
    done: _Done | None = None
    place = 0
    while place < min(_TRIED, alike - 2):
        before, done = done, (yield from _run(parts[place], machine, assumptions, done))
        place += 1
        if done.slice is None or before is None or done.slice != before.slice:
            continue
        with torch._C.DisableTorchFunction():
            last = _written(done, alike - 1 - place, machine)
        written(alike - 1 - place)
        again = yield from _run(parts[alike - 1], machine, assumptions, last)
        if again.slice != done.slice:
            raise RunAgain("the last round is another than those that were written")
        place = alike
    yield from parts[place:]


def _run(
    part: slice, machine: RecordingMode, assumptions: Callable[[], int], before: _Done | None
) -> Generator[slice, None, _Done]:
    begun = Begun(machine, assumptions)
    yield part
    with torch._C.DisableTorchFunction():
        trace = machine.recorder.trace
        call = Call(
            range(0), NONE, first_event=begun.first_event, events=len(trace.events) - begun.first_event,
            first_storage=begun.first_storage, storages=len(trace.storages) - begun.first_storage,
        )  # fmt: skip
        if before is None:
            return _Done(call, None)
        try:
            made, is_clean = begun.end(before.call, in_loop=True)
        except UnknownError:
            return _Done(call, None)
        # Numbers that were looked at decide nothing, as loops promise; computed ones would have to be in each round.
        is_all = is_clean and not (made.paid or made.held[0] or made.first_place)
        let_go = {number for kind, origin, number in made.events if kind is EventKind.FREE and origin is From.FORWARD}
        return _Done(call, made if is_all and let_go == set(made.alive) else None)


def _written(done: _Done, times: int, machine: RecordingMode) -> _Done:
    """Write so many rounds like the one that is done. What this has left stands for what the last of them leaves."""
    assert done.slice is not None
    trace, call = machine.recorder.trace, done.call
    for _ in range(times):
        first_event, before = len(trace.events), call
        try:
            first_storage = write(done.slice, machine, before)
        except UnknownError as error:
            raise RunAgain(str(error)) from None
        call = dataclasses.replace(before, first_event=first_event, first_storage=first_storage)
    for number in done.slice.alive:
        machine.recorder.rename(done.call.first_storage + number, call.first_storage + number)
    return _Done(call, done.slice)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
