"""What happens at the program's end, while the virtual GPU still exists: its `atexit` handlers, and the end of the
processes that it has started."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from memprof.patching import Patch

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_SITE_PACKAGES = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)


class ExitHandlers:
    """Exit handlers that the program, or an installed library, registers; `is_program` recognizes the program's code.

    Handlers of the standard library are left to this process, which goes on: weakref's handler would end all
    finalizers.
    """

    def __init__(self, is_program: Callable[[CodeType], bool]) -> None:
        self._is_program = is_program
        self._handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._skips_handlers = False

    def patches(self) -> Iterator[Patch]:
        """Yield patches (owner, name, replacement) of `atexit.register` and `atexit.unregister`."""
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
        """Remove all handlers, because the program exits by `os._exit`."""
        self._handlers.clear()
        self._skips_handlers = True

    def run(self) -> SystemExit | None:
        """Run the handlers, the last one first, and wait for started processes as Python does.

        Returns the SystemExit if a handler calls `os._exit`, else None.
        """
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
        for child in multiprocessing.active_children():
            if not child.daemon:
                child.join()
        return None

    def _is_program_code(self, code: CodeType) -> bool:
        file = code.co_filename
        return self._is_program(code) and (file.startswith(_SITE_PACKAGES) or not file.startswith(_STDLIB))
