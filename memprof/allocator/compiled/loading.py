"""rules.py compiled by numba, from the user's cache folder if it was compiled before; or None, and Python plays on.

What numba keeps is code of the machine, which is run as it is read. So it lies in a folder of the user's own that
nobody else may write, named by all that it was made of: numba itself looks at a file's time and size alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memprof.device.ceiling import left_bytes

FEWEST_EVENTS = 100_000
FEWEST_KEPT = 500_000
FEWEST = 2_000_000
"""Events from which it pays, in a process that has the code, where it is kept, and where it is still to be compiled. An
event costs 0.7 microseconds less (recorded) or 1.6 (of a trace with counters); to import numba and load the code takes
0.35 seconds at least, to compile it 4, which the third recording of 2,000,000 events has paid back."""
ROOM_BYTES = 1 << 30
"""What must be left below the ceiling of this process's memory: LLVM ends a process that gets none."""
_OPTIONS = {"forceinline": True, "_nrt": False}
"""In line, and without numba's counting of references: nothing here makes an array, and the caller holds them all. So
five times as many events are played in a second."""
_SOURCES = ("compiled/rules.py", "rounding.py")
"""What is compiled, and the constants in it."""
_OTHERS_WRITE = 0o022

_loaded: list[Compiled | None] = []


class Compiled(NamedTuple):
    """Functions of rules.py."""

    play: Callable[..., Any]
    number: Callable[..., Any]


def compiled(events: int) -> Compiled | None:
    """The rules as numba compiles them, if that pays for so many events; None: plain Python plays them."""
    if events < FEWEST_EVENTS:
        return None
    if not _loaded:
        if events < FEWEST_KEPT or (events < FEWEST and not is_kept()):
            return None
        _loaded.append(load())
    return _loaded[0]


def load() -> Compiled | None:
    """The rules as numba compiles them; None: it is not installed, or does not work here."""
    left = left_bytes()
    if left is not None and left < ROOM_BYTES:
        return None
    from memprof.allocator.compiled import rules  # brings numpy, with one thread, before numba does

    try:
        return _compile(rules)
    except Exception:  # it fails in as many ways as there are installations of it, and nothing depends on it
        _forget()
        return None


def is_kept() -> bool:
    """Whether code that was compiled before is there to be loaded, as far as names tell."""
    folder = _folder()
    return folder is not None and len(list(folder.rglob("*.nbc"))) >= len(Compiled._fields)


def _folder() -> Path | None:
    """Where code is kept; its name says what it was made of, beside numba and the processor, which numba asks for."""
    import hashlib  # these are for few runs, and no library of C is to be loaded beside torch's
    from importlib import resources

    from memprof.cache.store import COMPILED, cache_folder

    folder = cache_folder()
    if folder is None:
        return None
    made_of = hashlib.sha256(str(sys.implementation.cache_tag).encode())
    for name in _SOURCES:
        made_of.update(resources.files("memprof.allocator").joinpath(name).read_bytes())
    return folder / COMPILED / made_of.hexdigest()[:16]


def _kept_folder() -> Path | None:
    """That folder, made if need be; None: nothing can be kept, or somebody else could put code there."""
    folder = _folder()
    if folder is None:
        return None
    try:
        for own in (folder.parent.parent, folder.parent, folder):
            own.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = own.stat()
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE):
                return None
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _forget() -> None:
    """Let the next process compile anew: what is kept may be what failed."""
    folder = _folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(rules: types.ModuleType) -> Compiled:
    import numba

    folder = _kept_folder()
    scope = dict(vars(rules))
    with _cache_at(numba.config, folder):
        for name, plain in vars(rules).items():
            if isinstance(plain, types.FunctionType):
                outside = name in Compiled._fields
                options = _OPTIONS | {"forceinline": not outside, "cache": outside and folder is not None}
                scope[name] = numba.njit(**options)(_in_scope(plain, scope))
        found = Compiled(*(scope[name] for name in Compiled._fields))
        _call_once(found, rules)
    return found


def _in_scope(plain: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    """The function with other globals, among which the functions that it calls are compiled ones."""
    made = types.FunctionType(plain.__code__, scope, plain.__name__)
    made.__module__ = plain.__module__
    return made


@contextlib.contextmanager
def _cache_at(config: Any, folder: Path | None) -> Iterator[None]:
    """Let numba keep what it compiles here in `folder`; a program that is run may use numba too, with its own."""
    before = config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _call_once(found: Compiled, rules: types.ModuleType) -> None:
    """Compile or load both: without events, in the types that they will be called with."""
    np = rules.np
    bits, short, whole = (np.zeros(0, kind) for kind in (np.uint8, np.int32, np.int64))
    shorts, wholes = np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int64)
    events = rules.Events(bits, short, whole, whole, whole)
    state = rules.State(wholes, shorts, wholes, wholes, whole, short, short)
    results = rules.Results(whole, whole, whole, whole)
    found.play(0, 0, 0, rules.NO_BLOCK, events, rules.Rules(0, 0, 0, False, whole), state, results)
    found.number(whole, wholes, short)
