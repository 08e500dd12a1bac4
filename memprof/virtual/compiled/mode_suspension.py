"""memprof taken off the program for a moment: while torch compiles, it sees its own functions and no modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from memprof.patching import PatchSet
from memprof.torch_private import dispatch
from memprof.torch_private.dispatch import pop_function_mode, push_function_mode


class Lifting:
    """Takes the run's patches and modes away, and puts what compiling needs in their place."""

    def __init__(
        self, patches: PatchSet, modes: tuple[object, ...], instead: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._patches = patches
        self._modes = modes
        self._instead = instead
        self._held: contextlib.ExitStack | None = None

    @property
    def is_active(self) -> bool:
        """Return whether nothing is lifted now."""
        return self._held is None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, torch is as it is without memprof, but for what compiling needs."""
        if self._held is not None:
            yield
            return
        self._lift()
        try:
            yield
        finally:
            self._put_back()

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, the run is as it is outside of a lifting."""
        if self._held is None:
            yield
            return
        self._put_back()
        try:
            yield
        finally:
            self._lift()

    def _lift(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._without_modes())
            stack.enter_context(self._patches.suspended())
            stack.enter_context(self._instead())
            self._held = stack.pop_all()

    def _put_back(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    @contextlib.contextmanager
    def _without_modes(self) -> Iterator[None]:
        functions = [pop_function_mode() for _ in range(dispatch.len_torch_function_stack())]
        operators = [dispatch.pop_dispatch_mode() for _ in range(dispatch.len_torch_dispatch_stack())]
        _stack(functions, push_function_mode, self._modes)
        _stack(operators, dispatch.push_dispatch_mode, self._modes)
        try:
            yield
        finally:
            for _ in range(dispatch.len_torch_function_stack()):
                pop_function_mode()
            for _ in range(dispatch.len_torch_dispatch_stack()):
                dispatch.pop_dispatch_mode()
            _stack(functions, push_function_mode)
            _stack(operators, dispatch.push_dispatch_mode)


def _stack(popped: list[Any], push: Callable[[Any], None], without: tuple[object, ...] = ()) -> None:
    for mode in reversed(popped):
        if not any(mode is one for one in without):
            push(mode)
