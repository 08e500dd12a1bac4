"""torch's libraries, loaded by a second thread while the first imports what needs none of them.

Before the first line of `import torch` in Python has done anything, the dynamic linker has taken some 0.15 seconds to
bind libtorch and to register its operators. None of that holds Python's lock, if Python is not asked to do it:
`ctypes.CDLL` keeps the lock up to Python 3.12, a call of the linker's own function through ctypes does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_LIBRARIES = (("libtorch_global_deps", os.RTLD_GLOBAL), ("libtorch", 0)) if hasattr(os, "RTLD_GLOBAL") else ()
"""As torch/__init__.py loads them: what it makes visible to all first. None needs Python, so that none waits for it."""
_OF_C = ("_contextvars", "_csv", "_socket", "array", "pickle", "statistics")
"""Modules that memprof's own need and that are libraries too, in some builds of Python: the linker loads one at a time.

`_csv` and `_socket` are what `importlib.metadata` needs, `_contextvars` what the console does.
"""
_ENDING = ".dylib" if sys.platform == "darwin" else ".so"


@contextlib.contextmanager
def torch_loads() -> Iterator[None]:
    """At the end torch's libraries are in memory, where they can be found, and nobody loads any more.

    Inside, nothing may change the environment's variables, which the libraries read.
    """
    for name in _OF_C:
        with contextlib.suppress(ImportError):  # another interpreter has them in Python
            importlib.import_module(name)
    loader = threading.Thread(target=_load, name="memprof loads torch")
    with contextlib.suppress(RuntimeError):  # no room for it: torch loads them itself
        loader.start()
    try:
        yield
    finally:
        if loader.ident is not None:
            loader.join()


def _load() -> None:
    found = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if found is None or found.origin is None or not _LIBRARIES:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, mode in _LIBRARIES:
        file = Path(found.origin).with_name("lib") / f"{name}{_ENDING}"
        if file.exists():  # where it cannot be loaded, torch says why
            dlopen(os.fsencode(file), os.RTLD_NOW | mode)
