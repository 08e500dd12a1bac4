"""Access to the local variables of running functions, without keeping their values alive."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any


def read_local_variables(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of `frame` by name. Before Python 3.13 the frame keeps the dict `frame.f_locals`, and
    so its values, alive: the dict is cleared, unless the program refers to it too."""
    frame_locals = frame.f_locals
    values = dict(frame_locals)
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    # References: the frame's, `frame_locals`, and the call's argument.
    if is_copy and sys.getrefcount(frame_locals) <= 3:
        frame_locals.clear()
    return values


def find_running_frame_ids() -> set[int]:
    """Return the ids of the running frames of all threads. They are not holders: their variables are found separately.
    A frame that only a traceback keeps alive is a holder."""
    running = set()
    frames: list[FrameType | None] = list(sys._current_frames().values())
    while frames:
        # The frames include this function's own: a variable that keeps referring to it would keep all frames alive.
        frame = frames.pop()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
    return running
