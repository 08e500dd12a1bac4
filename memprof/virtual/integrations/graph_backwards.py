"""Backward passes whose gradients can be differentiated again: the trace has the lines that ask for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memprof.patching import Extension, Patch
from memprof.torch_private import autograd
from memprof.trace.events import GraphBackward
from memprof.virtual.install_context import InstallContext
from memprof.watch.program_code import is_program

_CREATES_GRAPH = 3  # place of create_graph among the engine's arguments


class GraphBackwards(Extension):
    """Patch of the autograd engine that records passes with create_graph=True."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patch of the function that runs backward passes."""
        original, trace = autograd.engine_run_backward.get(), context.recorder.trace
        find_line = context.recorder.attribution.find_source_index

        def run_and_record(*args: Any, **kwargs: Any) -> Any:
            if not args[_CREATES_GRAPH] or autograd.current_graph_task_id() != -1:
                return original(*args, **kwargs)
            begin, frame = len(trace.events), _find_program(sys._getframe(1))
            source, caller = find_line(frame), find_line(None if frame is None else frame.f_back)
            try:
                return original(*args, **kwargs)
            finally:
                trace.graph_backwards.append(GraphBackward(begin, len(trace.events), source, caller))

        yield autograd.engine_run_backward.patch(run_and_record)


def _find_program(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program at or above `frame`; None if torch.func asks for the gradient, or no
    frame is the program's."""
    while frame is not None and not is_program(frame.f_code):
        if frame.f_globals.get("__name__", "").startswith("torch._functorch"):
            return None
        frame = frame.f_back
    return frame
