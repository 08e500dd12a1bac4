"""Search for what a program has dropped, and what only Python's garbage collector will free."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from memprof.watch.frames import find_running_frame_ids, read_local_variables
from memprof.watch.program_code import MEMPROF_DIR, WORKLOAD_DIR, is_program


def list_unreachable(values: Sequence[Any]) -> list[Any]:
    """Return those of `values` to which no variable leads, of a running function or an imported module.

    What C++ has is not seen, such as what an autograd graph has saved. The search ends with the last of the values that
    is reached; what is not reached costs a visit to all objects of the process, which takes about a second.
    """
    wanted = {id(value): value for value in values}
    seen = find_running_frame_ids()  # their variables are roots, but not those of this search
    for roots in (_list_variables(), _list_module_variables()):
        level = roots
        while level and wanted:
            # Without the running frames: a variable of this function that had its own would keep both.
            parts = {id(one): one for one in gc.get_referents(*level) if id(one) not in seen and gc.is_tracked(one)}
            for key in wanted.keys() & parts.keys():
                del wanted[key]
            level = list(parts.values())
            seen.update(parts)
    return list(wanted.values())


def _list_variables() -> list[Any]:
    """Return the variables of the program's running functions, and then of its libraries'; none of memprof's own."""
    frames = _list_frames()
    frames.sort(key=lambda frame: not is_program(frame.f_code))
    return [list(read_local_variables(frame).values()) for frame in frames]


def _list_module_variables() -> list[Any]:
    """Return the variables of all imported modules but memprof's own."""
    modules = [(name, getattr(module, "__dict__", None)) for name, module in list(sys.modules.items())]
    return [
        list(namespace.values())
        for name, namespace in modules
        if isinstance(namespace, dict) and name.partition(".")[0] != "memprof"
    ]


def _is_of_memprof(file_name: str) -> bool:
    return file_name.startswith(MEMPROF_DIR) and not file_name.startswith(WORKLOAD_DIR)


def _list_frames() -> list[FrameType]:
    """Return the frames of the running functions of all threads, without memprof's own."""
    innermost = list(sys._current_frames().values())
    frames = []
    while innermost:
        # This function's own frame is among them: a variable that kept referring to it would keep all frames alive.
        frame: FrameType | None = innermost.pop()
        while frame is not None:
            if not _is_of_memprof(frame.f_code.co_filename):
                frames.append(frame)
            frame = frame.f_back
    return frames
