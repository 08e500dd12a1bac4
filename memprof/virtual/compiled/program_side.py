"""Effects of Dynamo on the program itself: made as the program would make them, or left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from memprof.torch_private import dynamo
from memprof.torch_private.dispatch import get_current_function_mode_stack
from memprof.virtual.compiled.mode_suspension import Lifting

_ONE_GRAPH = "Backward passes are not compiled as one graph here (compiled autograd), and run as without."


def patches(lifted: Lifting, function_mode: Any, assume: Callable[[str], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) of Dynamo."""

    yield from _of_optimizers(dynamo.OptimizerVariable.get(), lifted)
    yield from _of_streams()

    @contextlib.contextmanager
    def enable(*args: Any, **kwargs: Any) -> Iterator[None]:
        assume(_ONE_GRAPH)
        yield

    yield dynamo.enable_compiled_autograd.patch(enable)
    replace = dynamo.set_torch_function_mode_stack.get(None)
    if replace is not None:

        def set_modes(modes: list[Any]) -> None:
            # Compiled code that has entered or left a mode lays down the stack as it was when it was compiled.
            own = [mode for mode in get_current_function_mode_stack() if mode is function_mode]
            replace([*(mode for mode in own if mode not in modes), *modes])

        yield dynamo.set_torch_function_mode_stack.patch(set_modes)


@contextlib.contextmanager
def constants(kind: type) -> Iterator[None]:
    """Inside, a value of this type is a constant for Dynamo, as a GPU's properties are."""
    constant_types, variable = dynamo.common_constant_types.get(), dynamo.ConstantVariable.get()
    constant_types.add(kind)
    handlers = dynamo.type_handlers.get({})
    handlers[kind] = lambda tracer, value: variable.create(value)
    try:
        yield
    finally:
        constant_types.discard(kind)
        handlers.pop(kind, None)


def _of_optimizers(variable: Any, lifted: Lifting) -> Iterator[tuple[Any, str, Any]]:
    """Let a compiled optimizer make its state when it is compiled, by its own `_init_group`."""
    call = variable.call_method

    def call_method(self: Any, tracer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.value
        if name != "_init_group" or not hasattr(optimizer, name) or name in vars(optimizer):
            return call(self, tracer, name, *args, **kwargs)
        make = optimizer._init_group

        def init_group(*given: Any, **named: Any) -> Any:
            with lifted.put_back():
                return make(*given, **named)

        optimizer._init_group = init_group
        try:
            return call(self, tracer, name, *args, **kwargs)
        finally:
            del optimizer._init_group

    yield variable, "call_method", call_method
    for name in ("set_capturable", "_set_capturable"):
        choose = getattr(variable, name, None)
        if choose is not None:

            def set_capturable(self: Any, tracer: Any, choose: Any = choose) -> Any:
                with lifted.put_back():
                    for group in self.value.param_groups:
                        fresh = all(p.is_cuda and p not in self.value.state for p in group.get("params", ()))
                        if "capturable" in group and fresh:
                            group["capturable"] = True
                return choose(self, tracer)

            yield variable, name, set_capturable


def _of_streams() -> Iterator[tuple[Any, str, Any]]:
    """End a graph where the program enters a stream: those of the run are not of torch's own class.

    Dynamo would give up the whole function.
    """
    make = dynamo.create_stream_context.get(None)
    if make is None:
        return

    def create(tracer: Any, stream: Any, **kwargs: Any) -> Any:
        if not hasattr(stream, "user_object_index"):
            raise dynamo.Unsupported("a stream is entered")
        return make(tracer, stream, **kwargs)

    yield dynamo.create_stream_context.patch(staticmethod(create))
