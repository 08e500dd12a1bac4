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
