"""Patches of functions that bypass the dispatch mode: Python methods, and C++ functions that read a tensor's device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler

from memprof.patching import Extension, Patch
from memprof.torch_private import autograd, dispatch, tensors
from memprof.trace.events import AUTOCAST_KIND, NONE, Holder
from memprof.virtual.function_mode import FunctionMode
from memprof.virtual.install_context import InstallContext
from memprof.watch.recorder import Recorder
from memprof.workload.quantization import import_quietly

MAX_AUTOCAST_BLOCKS = 4  # that are recorded: a block in a loop ends in each iteration


class ModeBypasses(Extension):
    """Patches of functions that access data, group tensors by device, save tensors, or autocast in a backward pass."""

    def __init__(self) -> None:
        self._mode: FunctionMode | None = None

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that replace each function by the function mode's implementation."""
        mode = self._mode = context.function_mode
        yield from mode.interchange.patches()
        yield tensors.str_of_tensor.patch(
            mode.device_answers.wrap_str(tensors.str_of_tensor.get(), mode.interchange.read_values)
        )
        grouping = tensors.group_tensors_by_device_and_dtype
        yield grouping.patch(mode.device_answers.wrap_grouping(grouping.get()))
        compatibility_check = tensors.has_compatible_shallow_copy_type
        yield compatibility_check.patch(mode.assignments.wrap_compatibility_check(compatibility_check.get()))
        yield from mode.host_kinds.patches()
        yield _patch_saved_tensor_hooks(mode)
        yield from _patch_autocast(context)
        yield from _patch_profiler()

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return a context manager that replaces `safe_open` of safetensors."""
        return context.function_mode.interchange.safetensors.replace_safe_open()

    def leave_in_child(self) -> None:
        """Disable the replaced `safe_open` in a forked child process."""
        if self._mode is not None:
            self._mode.interchange.safetensors.is_disabled = True


def _patch_saved_tensor_hooks(mode: FunctionMode) -> Patch:
    """Return the patch of saved-tensor hooks (checkpointing, save_on_cpu), which runs the hooks under `mode`. C++ calls
    hooks without the mode, so that they would see meta tensors."""
    original = autograd.push_saved_tensors_default_hooks.get()

    def run_under_mode(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            if dispatch.len_torch_function_stack():
                return hook(value)
            with mode:
                return hook(value)

        return call

    def push_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        original(run_under_mode(pack), run_under_mode(unpack))

    return autograd.push_saved_tensors_default_hooks.patch(push_hooks)


def _record_copies(recorder: Recorder, copies: Iterable[torch.Tensor]) -> None:
    """Record the autocast block that ends, if it has kept `copies` of weights beyond the phase that made them."""
    trace = recorder.trace
    storages = sorted({recorder.storages.get_index(copy) for copy in copies} - {NONE})
    is_kept = any(trace.storages[index].phase < len(trace.phases) - 1 for index in storages)
    if is_kept and sum(holder.kind == AUTOCAST_KIND for holder in trace.idle_holders) < MAX_AUTOCAST_BLOCKS:
        source = trace.source_at(recorder.attribution.find_caller_line())
        trace.idle_holders.append(
            Holder(len(trace.events), AUTOCAST_KIND, "", source, True, None, tuple(storages), 0, 0, None)
        )


def _patch_autocast(context: InstallContext) -> Iterator[Patch]:
    """Yield patches that clear autocast's cache of casted weights as torch does, and autocast in backward passes."""
    mode, dispatch_mode = context.function_mode, context.dispatch_mode
    original = torch.clear_autocast_cache

    def clear_cache() -> None:
        original()
        with torch.DisableTorchFunction():
            _record_copies(context.recorder, mode.autocast.list_copies())
        mode.autocast.clear_cache()

    yield torch, "clear_autocast_cache", clear_cache
    run_backward = autograd.engine_run_backward.get()

    def run_backward_with_cast(*args: Any, **kwargs: Any) -> Any:
        # A dispatch mode runs with autocast off; operators that the engine calls inside a region are cast nevertheless.
        outer_cast = dispatch_mode.cast_arguments
        dispatch_mode.cast_arguments = mode.autocast.cast if torch.is_autocast_enabled(context.gpus.type) else None
        try:
            return run_backward(*args, **kwargs)
        finally:
            dispatch_mode.cast_arguments = outer_cast

    yield autograd.engine_run_backward.patch(run_backward_with_cast)


def _patch_profiler() -> Iterator[Patch]:
    """Yield a patch by which `torch.profiler` records only the host: no work runs on a GPU."""
    original = autograd_profiler.profile.__init__

    @functools.wraps(original)
    def __init__(profiler: Any, *args: Any, **kwargs: Any) -> None:
        # memprof imports this module while operators run. torch's tracer reads names of code objects at the end; the
        # code of a module being imported would be freed by then.
        import_quietly("torch.utils.flop_counter")
        original(profiler, *args, **kwargs)
        profiler_states = autograd.ProfilerState
        if getattr(profiler, "profiler_kind", None) == profiler_states.KINETO_GPU_FALLBACK:
            # Else the profiler would record a CUDA event for each operator, and print a page of warnings.
            profiler.profiler_kind = profiler_states.KINETO
        activities = getattr(profiler, "kineto_activities", None)
        if activities:
            activities.discard(torch.profiler.ProfilerActivity.CUDA)

    yield autograd_profiler.profile, "__init__", __init__
