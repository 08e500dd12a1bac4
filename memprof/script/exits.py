"""Handlers that the program registers with `atexit`: run at its own end, where its GPU still is, as they would be."""

from __future__ import annotations

import atexit
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from memprof.patching import Patch

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)


class ExitHandlers:
    """Handlers that the program, or a library of its own, registers; `is_program` tells their code.

    What Python's own modules register is for this process, which has more to do: weakref's handler, run once, would be
    the end of all finalizers.
    """

    def __init__(self, is_program: Callable[[CodeType], bool]) -> None:
        self._is_program = is_program
        self._handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._dropped = False

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) that see them registered."""
        original, forget = atexit.register, atexit.unregister

        def register(function: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
            if not self._is_own(sys._getframe(1).f_code):
                return original(function, *args, **options)
            self._handlers.append((function, args, options))
            return function

        def unregister(function: Callable[..., Any], /) -> None:
            self._handlers = [handler for handler in self._handlers if handler[0] != function]
            forget(function)

        yield atexit, "register", register
        yield atexit, "unregister", unregister

    def drop(self) -> None:
        """Run none: the program leaves by `os._exit`."""
        self._handlers.clear()
        self._dropped = True

    def run(self) -> SystemExit | None:
        """Run them, the last first, with those that they register; return the end by `os._exit` in one, if any."""
        self._dropped = False
        while self._handlers:
            function, args, options = self._handlers.pop()
            try:
                function(*args, **options)
            except BaseException as error:
                if self._dropped and isinstance(error, SystemExit):
                    return error
                print(f"Exception ignored in atexit callback: {function!r}", file=sys.stderr)  # noqa: T201
                traceback.print_exc()
        return None

    def _is_own(self, code: CodeType) -> bool:
        file = code.co_filename
        return self._is_program(code) and (file.startswith(_INSTALLED) or not file.startswith(_STDLIB))
