"""Bypasses of the dispatch mode: methods in Python, functions in C++ that ask a tensor for its device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler

from memprof.patching import Extension, Patch
from memprof.torch_private import autograd, dispatch, tensors
from memprof.virtual.function_mode import FunctionMode
from memprof.virtual.install_context import InstallContext
from memprof.workload.quantization import import_quietly


class ModeBypasses(Extension):
    """Reading and writing of data, groups by device, hooks of saved tensors, and autocast in a backward pass."""

    def __init__(self) -> None:
        self._mode: FunctionMode | None = None

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace each by what the function mode answers."""
        mode = self._mode = context.function_mode
        yield from mode.interchange.patches()
        yield tensors.str_of_tensor.patch(mode.answers.repr_of(tensors.str_of_tensor.get(), mode.interchange.read))
        by_device = tensors.group_tensors_by_device_and_dtype
        yield by_device.patch(mode.answers.grouping(by_device.get()))
        compatible = tensors.has_compatible_shallow_copy_type
        yield compatible.patch(mode.assignments.shares_data(compatible.get()))
        yield from mode.kinds.patches()
        yield _saved_tensor_patch(mode)
        yield from _autocast_patches(context)
        yield from _profiler_patches()

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return what has safetensors files opened by the interchange."""
        return context.function_mode.interchange.safetensors.opening()

    def leave_in_child(self) -> None:
        """Let the child open such files by itself."""
        if self._mode is not None:
            self._mode.interchange.safetensors.is_off = True


def _saved_tensor_patch(mode: FunctionMode) -> Patch:
    """Saved-tensor hooks (checkpointing, save_on_cpu) are called from inside C++ functions, where the function mode is
    off: there they would see meta tensors, and checkpointing would find that devices have changed."""
    original = autograd.push_saved_tensors_default_hooks.get()

    def under_mode(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            if dispatch.len_torch_function_stack():
                return hook(value)
            with mode:
                return hook(value)

        return call

    def push(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        original(under_mode(pack), under_mode(unpack))

    return autograd.push_saved_tensors_default_hooks.patch(push)


def _autocast_patches(context: InstallContext) -> Iterator[Patch]:
    """The half copies of weights live as long as the outermost autocast region."""
    mode, tracker = context.function_mode, context.tracker
    original = torch.clear_autocast_cache

    def clear() -> None:
        original()
        mode.autocast.clear_cache()

    yield torch, "clear_autocast_cache", clear
    run_backward = autograd.engine_run_backward.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        # A dispatch mode runs with autocast off; what the engine calls inside a region is cast all the same.
        outer = tracker.cast
        tracker.cast = mode.autocast.cast if torch.is_autocast_enabled("cuda") else None
        try:
            return run_backward(*args, **kwargs)
        finally:
            tracker.cast = outer

    yield autograd.engine_run_backward.patch(run)


def _profiler_patches() -> Iterator[Patch]:
    """`torch.profiler` in the program: what runs here runs on the host, and there is no GPU to record."""
    original = autograd_profiler.profile.__init__

    @functools.wraps(original)
    def __init__(profiler: Any, *args: Any, **kwargs: Any) -> None:
        # memprof imports it while operators run. torch's tracer keeps names of code objects that it sees, not these:
        # of a module's own code, which is gone after its import, it reads freed memory at the end.
        import_quietly("torch.utils.flop_counter")
        original(profiler, *args, **kwargs)
        kinds = autograd.ProfilerState
        if getattr(profiler, "profiler_kind", None) == kinds.KINETO_GPU_FALLBACK:
            # It would ask for a CUDA event at each operator, and write a page of warnings where none can be had.
            profiler.profiler_kind = kinds.KINETO
        activities = getattr(profiler, "kineto_activities", None)
        if activities:
            activities.discard(torch.profiler.ProfilerActivity.CUDA)

    yield autograd_profiler.profile, "__init__", __init__
