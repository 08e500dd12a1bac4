"""Search for the tensors that a caught out-of-memory error keeps: its traceback has the frames of the failed attempt.

An error lives as long as a variable has it, and as long as its `except` block runs: a retry inside the block runs
beside the tensors of the attempt that failed.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from memprof.trace.events import HANDLER_KIND, HOST, Holder, PhaseKind, Role
from memprof.watch.caches import iterate_tensors
from memprof.watch.frames import find_running_frame_ids, read_local_variables
from memprof.watch.holders import HolderSearch
from memprof.watch.program_code import is_program
from memprof.watch.recorder import Recorder

# In these, what autograd saves for the attempt is allocated, and no variable has it.
_PHASES_OF_GRAPHS = (PhaseKind.FORWARD, PhaseKind.BACKWARD)


class _RaisedError(NamedTuple):
    error: weakref.ref[RuntimeError]
    event: int  # number of events when it was raised
    num_storages: int
    phase: int  # index in Trace.phases of the first phase of the attempt: that of its step's forward


class CaughtErrorWatch:
    """Watch over the out-of-memory errors that the virtual GPU raises, for those that outlive the failed attempt."""

    def __init__(self, recorder: Recorder, search: HolderSearch) -> None:
        self._recorder = recorder
        self._search = search
        self._errors: list[_RaisedError] = []

    def record_error(self, error: RuntimeError) -> None:
        """Record that `error` is about to be raised, and search for what the earlier ones keep now."""
        self.find_holders()
        trace = self._recorder.trace
        phase = len(trace.phases) - 1
        while phase and trace.phases[phase - 1].step == trace.phases[-1].step:
            phase -= 1
        self._errors.append(_RaisedError(weakref.ref(error), len(trace.events), len(trace.storages), phase))

    def find_holders(self) -> None:
        """Append to the trace the holder of each error that is still alive, once for each error."""
        if not self._errors:
            return
        with torch.DisableTorchFunction():
            errors, self._errors = self._errors, []
            for raised in errors:
                error = raised.error()
                if error is None:
                    continue
                if storages := self._find_kept(raised, error):
                    self._recorder.trace.error_holders.append(self._make_holder(error, storages))
                else:
                    self._errors.append(raised)  # it may still be passing through the program's frames

    def _find_kept(self, raised: _RaisedError, error: RuntimeError) -> tuple[int, ...]:
        """Return the live storages, unused since the error, that the frames of its traceback have, or their graphs."""
        trace, table = self._recorder.trace, self._recorder.storages
        running = find_running_frame_ids()
        values = [
            value
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if id(frame) not in running
            for value in read_local_variables(frame).values()
        ]
        in_frames = {table.get_index(tensor) for value in values for tensor in iterate_tensors(value)}
        known = {index for holder in trace.error_holders for index in holder.storages}
        older = {
            index
            for index in table.list_live()
            if index < raised.num_storages
            and table.get_last_use(index) <= raised.event
            and trace.storages[index].device != HOST
            and index not in known
        }
        kept = [index for index in older if index in in_frames or self._is_of_graph(index, raised)]
        kept = [index for index in kept if index not in trace.owners or trace.owners[index].role is Role.INPUT]
        # Modules of the failed attempt; those that a variable has are in use, or another finding's.
        weights = {
            index
            for value in values
            for weight in _iterate_weights(value)
            if (index := table.get_index(weight)) in older
        }
        kept += weights - self._search.find_in_variables(weights) if weights else ()
        if in_frames.isdisjoint(kept) and weights.isdisjoint(kept):
            return ()
        # Without the holder, the attempt's tensors would be freed as the error passes.
        table.record_uses_until(raised.event, kept)
        return tuple(sorted(kept))

    def _is_of_graph(self, index: int, raised: _RaisedError) -> bool:
        """Return whether storage `index` was made in the attempt, in a phase in which autograd saves tensors."""
        trace = self._recorder.trace
        phase = trace.storages[index].phase
        return phase >= raised.phase and trace.phases[phase].kind in _PHASES_OF_GRAPHS

    def _make_holder(self, error: RuntimeError, storages: tuple[int, ...]) -> Holder:
        """Return the `except` block in which the program goes on, else the variable that has `error`, else nothing."""
        source, kind, name = None, type(error).__name__, ""
        if _is_being_handled(error):
            frame = _find_handling_frame(error)
            kind = HANDLER_KIND
            if frame is not None:
                source, name = (
                    f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}",
                    frame.f_code.co_name,
                )
        elif (holder := self._search.find_holder_of_error(error)) is not None:
            return holder._replace(storages=storages)
        return Holder(len(self._recorder.trace.events), kind, name, source, False, None, storages, 0, 0, None)


def _iterate_weights(value: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of the modules in `value`: a module, or a list or tuple of modules."""
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, nn.Module):
            yield from part.parameters()
            yield from part.buffers()


def _is_being_handled(error: BaseException) -> bool:
    """Return whether an `except` block for `error`, or for an error raised from it, is running."""
    handled = sys.exc_info()[1]
    while handled is not None and handled is not error:
        handled = handled.__context__
    return handled is error


def _find_handling_frame(error: BaseException) -> FrameType | None:
    """Return the running frame of the program that has caught `error`; None if only libraries handle it."""
    running = find_running_frame_ids()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if id(frame) in running and is_program(frame.f_code):
            return frame
    return None
