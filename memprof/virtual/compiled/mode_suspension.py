"""Suspension of memprof's patches and modes while torch compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from memprof.patching import PatchSet
from memprof.torch_private import dispatch
from memprof.torch_private.dispatch import pop_function_mode, push_function_mode


class Suspension:
    """Suspension of the run's `patches` and `modes`: `with suspension():` enters `replacement` in their place."""

    def __init__(
        self, patches: PatchSet, modes: tuple[object, ...], replacement: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._patches = patches
        self._modes = modes
        self._replacement = replacement
        self._stack: contextlib.ExitStack | None = None

    @property
    def are_modes_active(self) -> bool:
        """Return whether the run's patches and modes are not suspended."""
        return self._stack is None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context manager: suspend patches and modes, and enter the replacement; nested calls change nothing."""
        if self._stack is not None:
            yield
            return
        self._suspend()
        try:
            yield
        finally:
            self._resume()

    @contextlib.contextmanager
    def resume(self) -> Iterator[None]:
        """Context manager: make patches and modes active again inside a suspension."""
        if self._stack is None:
            yield
            return
        self._resume()
        try:
            yield
        finally:
            self._suspend()

    def _suspend(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._remove_modes())
            stack.enter_context(self._patches.suspended())
            stack.enter_context(self._replacement())
            self._stack = stack.pop_all()

    def _resume(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @contextlib.contextmanager
    def _remove_modes(self) -> Iterator[None]:
        function_modes = [pop_function_mode() for _ in range(dispatch.len_torch_function_stack())]
        dispatch_modes = [dispatch.pop_dispatch_mode() for _ in range(dispatch.len_torch_dispatch_stack())]
        _push_modes(function_modes, push_function_mode, self._modes)
        _push_modes(dispatch_modes, dispatch.push_dispatch_mode, self._modes)
        try:
            yield
        finally:
            for _ in range(dispatch.len_torch_function_stack()):
                pop_function_mode()
            for _ in range(dispatch.len_torch_dispatch_stack()):
                dispatch.pop_dispatch_mode()
            _push_modes(function_modes, push_function_mode)
            _push_modes(dispatch_modes, dispatch.push_dispatch_mode)


def _push_modes(modes: list[Any], push: Callable[[Any], None], excluded_modes: tuple[object, ...] = ()) -> None:
    for mode in reversed(modes):
        if not any(mode is excluded for excluded in excluded_modes):
            push(mode)
