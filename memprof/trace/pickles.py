"""A pickle that can hold nothing but plain values: it constructs no object, imports no name and cannot blow up.

The unpickler of the standard library runs what a file tells it to. Here every name that a file asks for is refused, and
before anything is built the opcodes are walked, so that a size or an index that lies cannot make it take memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import NoReturn

_LIES = "a size in it is larger than the file"


class ForbiddenGlobal(Exception):
    """The file asks for a name to be imported; `args[0]` is it."""


class BrokenPickle(Exception):
    """The bytes are no complete pickle; `args[0]` says why."""


def load_plain(data: bytes) -> object:
    """The value in `data`: dicts, lists, tuples, sets, strings, bytes, numbers, booleans and None.

    Raises:
        ForbiddenGlobal: it asks for anything else.
        BrokenPickle: it is truncated, damaged or no pickle.
    """
    _walk(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except ForbiddenGlobal:
        raise
    except (MemoryError, RecursionError) as error:
        raise BrokenPickle(f"it cannot be held in memory ({type(error).__name__})") from None
    except Exception as error:  # the standard library raises nearly anything for a damaged pickle
        raise BrokenPickle(str(error) or type(error).__name__) from None


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ForbiddenGlobal(f"{module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ForbiddenGlobal(f"persistent id {pid!r}")


_UNKNOWN, _TWO_LINES, _INDEX4 = -100, -101, -102


def _widths() -> list[int]:
    """By opcode: the bytes that follow it, or, below 0, how these are found (as in pickletools, and three more)."""
    table = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        table[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    table[ord("c")] = table[ord("i")] = _TWO_LINES
    table[ord("r")] = _INDEX4
    return table


_WIDTHS = _widths()
_STOP = ord(".")
_FOUR = (pickletools.TAKEN_FROM_ARGUMENT4, pickletools.TAKEN_FROM_ARGUMENT4U)


def _fixed_run() -> re.Pattern[bytes]:
    """Matches opcodes of fixed width, as many as follow each other: nearly all of a snapshot."""
    kinds = []
    for width in sorted({width for width in _WIDTHS if width >= 0}):
        codes = b"".join(re.escape(bytes([c])) for c in range(256) if _WIDTHS[c] == width and c != _STOP)
        kinds.append(b"[" + codes + b"]" + b".{%d}" % width)
    return re.compile(b"(?:" + b"|".join(kinds) + b"){0,10000}+", re.DOTALL)


_FIXED_RUN = _fixed_run()


def _walk(data: bytes) -> None:
    """Check that every opcode and its argument lie within `data`, and that memo indices are not huge."""
    widths, size, at = _WIDTHS, len(data), 0
    skip = _FIXED_RUN.match
    while at < size:
        code = data[at]
        if widths[code] >= 0 and code != _STOP:
            found = skip(data, at)
            if found is not None and found.end() > at:
                at = found.end()
                continue
        width = widths[code]
        at += 1
        if width >= 0:
            if code == _STOP:
                return
            at += width
        elif width == pickletools.TAKEN_FROM_ARGUMENT1:
            at += 1 + data[at] if at < size else 1
        elif width in _FOUR:
            at += 4 + int.from_bytes(data[at : at + 4], "little")
        elif width == pickletools.TAKEN_FROM_ARGUMENT8U:
            at += 8 + int.from_bytes(data[at : at + 8], "little")
        elif width == _INDEX4:
            if int.from_bytes(data[at : at + 4], "little") > size:
                raise BrokenPickle(_LIES)
            at += 4
        elif width == _UNKNOWN:
            raise BrokenPickle(f"byte {at - 1} is no pickle opcode")
        else:
            for _ in range(2 if width == _TWO_LINES else 1):
                end = data.find(b"\n", at)
                if end < 0:
                    raise BrokenPickle("it is truncated")
                if code == ord("p") and (end - at > 12 or not data[at:end].isdigit() or int(data[at:end]) > size):
                    raise BrokenPickle(_LIES)
                at = end + 1
    raise BrokenPickle("it is truncated")
