"""Variables of running functions, read without keeping them live."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a function's variables by name. Before Python 3.13 the frame keeps what it is requested, and with it what
    the function lets go of later; so that is emptied, unless the program has requested it as well."""
    asked = frame.f_locals
    values = dict(asked)
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    # References: the frame's, `asked`, and the call's argument.
    if is_copy and sys.getrefcount(asked) <= 3:
        asked.clear()
    return values
