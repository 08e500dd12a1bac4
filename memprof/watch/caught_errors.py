"""Search for the tensors that a caught out-of-memory error keeps: its traceback has the frames of the failed attempt.

An error lives as long as a variable has it, and as long as its `except` block runs: a retry inside the block runs
beside the tensors of the attempt that failed.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from types import FrameType
from typing import NamedTuple

import torch

from memprof.trace.events import HANDLER_KIND, HOST, Holder, PhaseKind, Role
from memprof.watch.caches import iterate_tensors
from memprof.watch.frames import find_running_frame_ids, read_local_variables
from memprof.watch.holders import HolderSearch
from memprof.watch.program_code import is_program
from memprof.watch.recorder import Recorder

# In these, what autograd saves for the attempt is allocated, and no variable has it.
_PHASES_OF_GRAPHS = (PhaseKind.FORWARD, PhaseKind.BACKWARD)


class _RaisedError(NamedTuple):
    error: weakref.ref[torch.OutOfMemoryError]
    event: int  # number of events when it was raised
    num_storages: int
    phase: int  # index in Trace.phases of the first phase of the attempt: that of its step's forward


class CaughtErrorWatch:
    """Watch over the out-of-memory errors that the virtual GPU raises, for those that outlive the failed attempt."""

    def __init__(self, recorder: Recorder, search: HolderSearch) -> None:
        self._recorder = recorder
        self._search = search
        self._errors: list[_RaisedError] = []

    def record_error(self, error: torch.OutOfMemoryError) -> None:
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

    def _find_kept(self, raised: _RaisedError, error: torch.OutOfMemoryError) -> tuple[int, ...]:
        """Return the live storages, unused since the error, that the frames of its traceback have, or their graphs."""
        trace, table = self._recorder.trace, self._recorder.storages
        running = find_running_frame_ids()
        in_frames = {
            table.get_index(tensor)
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if id(frame) not in running
            for value in read_local_variables(frame).values()
            for tensor in iterate_tensors(value)
        }
        known = {index for holder in trace.error_holders for index in holder.storages}
        kept = []
        for index in table.list_live():
            storage, owner = trace.storages[index], trace.owners.get(index)
            is_older = index < raised.num_storages and table.get_last_use(index) <= raised.event
            is_of_graph = storage.phase >= raised.phase and trace.phases[storage.phase].kind in _PHASES_OF_GRAPHS
            if (
                is_older
                and storage.device != HOST
                and (owner is None or owner.role is Role.INPUT)
                and (index in in_frames or is_of_graph)
                and index not in known
            ):
                kept.append(index)
        if in_frames.isdisjoint(kept):
            return ()
        # Without the holder, the attempt's tensors would be freed as the error passes.
        table.record_uses_until(raised.event, kept)
        return tuple(kept)

    def _make_holder(self, error: torch.OutOfMemoryError, storages: tuple[int, ...]) -> Holder:
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
