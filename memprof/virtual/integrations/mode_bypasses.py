"""Bypasses of the dispatch mode: Python methods, and C++ functions that read a tensor's device."""

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
    """Functions that read and write data, group tensors by device, save tensors, or autocast in a backward pass."""

    def __init__(self) -> None:
        self._mode: FunctionMode | None = None

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that replace each function by the function mode's version."""
        mode = self._mode = context.function_mode
        yield from mode.interchange.patches()
        yield tensors.str_of_tensor.patch(
            mode.device_answers.wrap_str(tensors.str_of_tensor.get(), mode.interchange.read_values)
        )
        by_device = tensors.group_tensors_by_device_and_dtype
        yield by_device.patch(mode.device_answers.wrap_grouping(by_device.get()))
        compatible = tensors.has_compatible_shallow_copy_type
        yield compatible.patch(mode.assignments.wrap_compatibility_check(compatible.get()))
        yield from mode.host_kinds.patches()
        yield _saved_tensor_patch(mode)
        yield from _autocast_patches(context)
        yield from _profiler_patches()

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return a context manager under which the interchange opens safetensors files."""
        return context.function_mode.interchange.safetensors.replace_safe_open()

    def leave_in_child(self) -> None:
        """Let the child process open safetensors files by itself."""
        if self._mode is not None:
            self._mode.interchange.safetensors.is_disabled = True


def _saved_tensor_patch(mode: FunctionMode) -> Patch:
    """Return the patch of saved-tensor hooks (checkpointing, save_on_cpu): C++ calls the hooks without the function
    mode, where they would see meta tensors, and checkpointing would find changed devices."""
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
    """Yield patches that drop the half-precision copies of weights at the end of the outermost autocast region."""
    mode, dispatch_mode = context.function_mode, context.dispatch_mode
    original = torch.clear_autocast_cache

    def clear() -> None:
        original()
        mode.autocast.clear_cache()

    yield torch, "clear_autocast_cache", clear
    run_backward = autograd.engine_run_backward.get()

    def run_backward_with_cast(*args: Any, **kwargs: Any) -> Any:
        # A dispatch mode runs with autocast off; operators that the engine calls inside a region are cast nevertheless.
        outer = dispatch_mode.cast_arguments
        dispatch_mode.cast_arguments = mode.autocast.cast if torch.is_autocast_enabled("cuda") else None
        try:
            return run_backward(*args, **kwargs)
        finally:
            dispatch_mode.cast_arguments = outer

    yield autograd.engine_run_backward.patch(run_backward_with_cast)


def _profiler_patches() -> Iterator[Patch]:
    """Yield the patch of `torch.profiler`, which records no GPU here: all work runs on the host."""
    original = autograd_profiler.profile.__init__

    @functools.wraps(original)
    def __init__(profiler: Any, *args: Any, **kwargs: Any) -> None:
        # memprof imports this module while operators run. torch's tracer reads names of code objects at the end; the
        # code of a module being imported would be freed by then.
        import_quietly("torch.utils.flop_counter")
        original(profiler, *args, **kwargs)
        kinds = autograd.ProfilerState
        if getattr(profiler, "profiler_kind", None) == kinds.KINETO_GPU_FALLBACK:
            # Else the profiler would record a CUDA event for each operator, and print a page of warnings.
            profiler.profiler_kind = kinds.KINETO
        activities = getattr(profiler, "kineto_activities", None)
        if activities:
            activities.discard(torch.profiler.ProfilerActivity.CUDA)

    yield autograd_profiler.profile, "__init__", __init__
