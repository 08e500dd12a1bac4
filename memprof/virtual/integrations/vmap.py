"""Calls of torch.func.vmap, also those of jacrev, jacfwd and hessian: the trace has the number of rows of each.

torch.autograd has a vmap of its own, whose tensors have no storage for a dispatch mode; torch.func's computes the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import autograd
from memprof.trace.events import VmapCall
from memprof.virtual.install_context import InstallContext

_CALLERS = ("jacrev", "jacfwd")  # the functions that call vmap; hessian is jacfwd of jacrev
_AUTOGRAD = {"torch.autograd.functional": "autograd.functional", "torch.autograd": "autograd"}  # modules


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
        for name in (autograd.batched_grad_vmap, autograd.functional_vmap):
            if name.get(None) is not None:
                yield name.patch(_vmap)


def _vmap(
    function: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, allow_none_pass_through: bool = False
) -> Callable[..., Any]:
    """Return `function` for batches, as torch.autograd's own vmap does, by that of torch.func."""

    def run(*args: Any) -> Any:
        is_given: list[bool] = []

        def run_row(*row: Any) -> Any:
            result = function(*row)
            if not (allow_none_pass_through and isinstance(result, tuple)):
                return result
            is_given[:] = [one is not None for one in result]  # torch.func's vmap takes no None
            return tuple(one for one in result if one is not None)

        result = torch.func.vmap(run_row, in_dims, out_dims)(*args)
        if not is_given:
            return result
        given = iter(result)
        return tuple(next(given) if is_one else None for is_one in is_given)

    return run


def _find_function(frame: FrameType | None) -> str:
    """Return the function of torch whose call has led to `frame`: vmap, or one that calls vmap itself."""
    package = autograd.flat_vmap.module.rpartition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").startswith(package):
        function = frame.f_code.co_qualname.partition(".")[0]
        if function in _CALLERS:
            return function
        frame = frame.f_back
    function = "vmap"
    while frame is not None and (module := frame.f_globals.get("__name__", "")) in {__name__, *_AUTOGRAD}:
        if module in _AUTOGRAD and not frame.f_code.co_name.startswith(("_", "<")):  # the outermost is the program's
            function = f"{_AUTOGRAD[module]}.{frame.f_code.co_name}"
        frame = frame.f_back
    return function
