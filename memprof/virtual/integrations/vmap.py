"""Calls of torch.func.vmap, also those of jacrev, jacfwd and hessian: the trace has the number of rows of each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memprof.patching import Extension, Patch
from memprof.torch_private import autograd
from memprof.trace.events import VmapCall
from memprof.virtual.install_context import InstallContext

_CALLERS = ("jacrev", "jacfwd")  # the functions that call vmap; hessian is jacfwd of jacrev


class VmapCalls(Extension):
    """Patch of the function by which each transformation runs a function on a batch, or on a chunk of it."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patch, which records the call."""
        original = autograd.flat_vmap.get(None)
        if original is None:
            return
        trace, find_line = context.recorder.trace, context.recorder.attribution.find_caller_line

        @functools.wraps(original)
        def run_and_record(func: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
            begin, function, source = len(trace.events), _find_function(sys._getframe(1)), find_line()
            try:
                return original(func, batch_size, *args, **kwargs)
            finally:
                trace.vmaps.append(VmapCall(begin, len(trace.events), batch_size, function, source))

        yield autograd.flat_vmap.patch(run_and_record)


def _find_function(frame: FrameType | None) -> str:
    """Return the function of torch.func whose call has led to `frame`: vmap, or one that calls vmap itself."""
    package = autograd.flat_vmap.module.rpartition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").startswith(package):
        function = frame.f_code.co_qualname.partition(".")[0]
        if function in _CALLERS:
            return function
        frame = frame.f_back
    return "vmap"
