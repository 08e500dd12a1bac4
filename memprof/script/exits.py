"""The program's `atexit` handlers, run at the program's end, when the GPU still exists."""

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
    """Handlers that the program, or an installed library, registers; `is_program` recognizes such code.

    Handlers of Python's own modules are left to this process, which goes on: weakref's handler would end all
    finalizers.
    """

    def __init__(self, is_program: Callable[[CodeType], bool]) -> None:
        self._is_program = is_program
        self._handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._skips_handlers = False

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) that intercept registrations."""
        original, original_unregister = atexit.register, atexit.unregister

        def register(function: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
            if not self._is_program_code(sys._getframe(1).f_code):
                return original(function, *args, **options)
            self._handlers.append((function, args, options))
            return function

        def unregister(function: Callable[..., Any], /) -> None:
            self._handlers = [handler for handler in self._handlers if handler[0] != function]
            original_unregister(function)

        yield atexit, "register", register
        yield atexit, "unregister", unregister

    def discard(self) -> None:
        """Run no handlers: the program exits by `os._exit`."""
        self._handlers.clear()
        self._skips_handlers = True

    def run(self) -> SystemExit | None:
        """Run the handlers, the last first; return the SystemExit of an `os._exit` in a handler, or None."""
        self._skips_handlers = False
        while self._handlers:
            function, args, options = self._handlers.pop()
            try:
                function(*args, **options)
            except BaseException as error:
                if self._skips_handlers and isinstance(error, SystemExit):
                    return error
                print(f"Exception ignored in atexit callback: {function!r}", file=sys.stderr)  # noqa: T201
                traceback.print_exc()
        return None

    def _is_program_code(self, code: CodeType) -> bool:
        file = code.co_filename
        return self._is_program(code) and (file.startswith(_INSTALLED) or not file.startswith(_STDLIB))
