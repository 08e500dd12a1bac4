"""Variables of running functions, read without keeping them live."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any


def read_local_variables(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of `frame` by name, without keeping the values live. Before Python 3.13 a frame keeps
    the dict that `f_locals` returns; that dict is cleared, unless the program refers to the dict too."""
    frame_locals = frame.f_locals
    values = dict(frame_locals)
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    # References: the frame's, `frame_locals`, and the call's argument.
    if is_copy and sys.getrefcount(frame_locals) <= 3:
        frame_locals.clear()
    return values
