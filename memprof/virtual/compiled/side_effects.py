"""Patches of Dynamo where compilation changes the program's objects: it runs under memprof's patches, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from memprof.torch_private import dynamo
from memprof.torch_private.dispatch import get_current_function_mode_stack
from memprof.virtual.compiled.mode_suspension import Suspension

_NO_COMPILED_AUTOGRAD = "Backward passes are not compiled as one graph here (compiled autograd), and run as without."


def patches(
    suspension: Suspension, function_mode: Any, assume: Callable[[str], None]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) of Dynamo's functions."""

    yield from _patch_optimizers(dynamo.OptimizerVariable.get(), suspension)
    yield from _patch_streams()

    @contextlib.contextmanager
    def enable_compiled_autograd(*args: Any, **kwargs: Any) -> Iterator[None]:
        assume(_NO_COMPILED_AUTOGRAD)
        yield

    yield dynamo.enable_compiled_autograd.patch(enable_compiled_autograd)
    original_set_modes = dynamo.set_torch_function_mode_stack.get(None)
    if original_set_modes is not None:

        def set_modes(modes: list[Any]) -> None:
            # Compiled code that has entered or left a mode sets the stack of the time of compilation.
            own_modes = [mode for mode in get_current_function_mode_stack() if mode is function_mode]
            original_set_modes([*(mode for mode in own_modes if mode not in modes), *modes])

        yield dynamo.set_torch_function_mode_stack.patch(set_modes)


@contextlib.contextmanager
def register_constant_type(constant_type: type) -> Iterator[None]:
    """Context manager: Dynamo treats values of the type `constant_type` as constants, as it does a GPU's properties."""
    constant_types, constant_variable = dynamo.common_constant_types.get(), dynamo.ConstantVariable.get()
    constant_types.add(constant_type)
    handlers = dynamo.type_handlers.get({})
    handlers[constant_type] = lambda tracer, value: constant_variable.create(value)
    try:
        yield
    finally:
        constant_types.discard(constant_type)
        handlers.pop(constant_type, None)


def _patch_optimizers(variable_class: Any, suspension: Suspension) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches with which Dynamo creates an optimizer's state (`_init_group`) under memprof's patches."""
    original_call = variable_class.call_method

    def call_method(self: Any, tracer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.value
        if name != "_init_group" or not hasattr(optimizer, name) or name in vars(optimizer):
            return original_call(self, tracer, name, *args, **kwargs)
        original = optimizer._init_group

        def init_group(*init_args: Any, **init_kwargs: Any) -> Any:
            with suspension.resume():
                return original(*init_args, **init_kwargs)

        optimizer._init_group = init_group
        try:
            return original_call(self, tracer, name, *args, **kwargs)
        finally:
            del optimizer._init_group

    yield variable_class, "call_method", call_method
    for name in ("set_capturable", "_set_capturable"):
        original_set = getattr(variable_class, name, None)
        if original_set is not None:

            def set_capturable(self: Any, tracer: Any, original_set: Any = original_set) -> Any:
                with suspension.resume():
                    for group in self.value.param_groups:
                        is_new = all(p.is_cuda and p not in self.value.state for p in group.get("params", ()))
                        if "capturable" in group and is_new:
                            group["capturable"] = True
                return original_set(self, tracer)

            yield variable_class, name, set_capturable


def _patch_streams() -> Iterator[tuple[Any, str, Any]]:
    """Yield a patch that makes a graph break where the program enters a stream. Dynamo would otherwise not compile the
    function at all, since memprof's streams are not of torch's class."""
    original = dynamo.create_stream_context.get(None)
    if original is None:
        return

    def create_stream_context(tracer: Any, stream: Any, **kwargs: Any) -> Any:
        if not hasattr(stream, "user_object_index"):
            raise dynamo.Unsupported("a stream is entered")
        return original(tracer, stream, **kwargs)

    yield dynamo.create_stream_context.patch(staticmethod(create_stream_context))
