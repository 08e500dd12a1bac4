"""A pickle that can hold nothing but plain values: it constructs no object, imports no name and takes its time.

The unpickler of the standard library runs what a file tells it to. Here every name that a file asks for is refused, and
before anything is built the opcodes are walked, so that a size or an index that lies cannot make it take memory, nor
thousands of keys of one hash make it take forever. What memory it may take is the caller's to say: MemoryError passes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

_LIES = "a size in it is larger than the file"


class ForbiddenGlobal(Exception):
    """The file asks for a name to be imported; `args[0]` is it."""


class BrokenPickle(Exception):
    """The bytes are no complete pickle; `args[0]` says why."""


class NotRegular(Exception):
    """Events cannot be told from the bytes (trace/pickled_events.py): the file is for `load_plain`."""


def load_plain(data: bytes) -> object:
    """Return the value in `data`: dicts, lists, tuples, strings, bytes, numbers of up to 64 bits, booleans and None.
    Raises ForbiddenGlobal: it asks for anything else; BrokenPickle: it is truncated, damaged or no pickle."""
    _walk(data)
    try:
        return PlainUnpickler(io.BytesIO(data)).load()
    except (ForbiddenGlobal, MemoryError):
        raise
    except Exception as error:  # the standard library raises nearly anything for a damaged pickle
        raise BrokenPickle(str(error) or type(error).__name__) from None


class PlainUnpickler(pickle.Unpickler):
    """Refuses every name. For bytes whose opcodes were walked."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse it: see the class."""
        raise ForbiddenGlobal(f"{module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        """Refuse it: see the class."""
        raise ForbiddenGlobal(f"persistent id {pid!r}")


_UNKNOWN, _TWO_LINES, _INDEX4, _TUPLE, _LONG, _NUMBER = -100, -101, -102, -103, -104, -105
_LONG_BYTES = 9  # of a number, with its sign: of longer ones, any number have one hash
_NUMBER_CHARACTERS = 24
MOST_TUPLES = 10_000  # beside pairs of short numbers (pool ids): of others one can make any number with one hash
_NEVER = ("EMPTY_SET", "FROZENSET", "LONG4")
_SHORT = rb"(?:K.|M..|J....)"
_PAIR = rb"%b{2}\x86|\(%b{2}t" % (_SHORT, _SHORT)


def _widths() -> list[int]:
    """Return by opcode the bytes that follow it, or, below 0, how these are found (as in pickletools, and more)."""
    table = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        if opcode.name not in _NEVER:
            table[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    for code, width in (("c", _TWO_LINES), ("i", _TWO_LINES), ("r", _INDEX4), ("I", _NUMBER), ("L", _NUMBER)):
        table[ord(code)] = width
    for code in "t\x85\x86\x87":
        table[ord(code)] = _TUPLE
    table[0x8A] = _LONG
    return table


WIDTHS = _widths()
STOP = ord(".")
_FOUR = (pickletools.TAKEN_FROM_ARGUMENT4, pickletools.TAKEN_FROM_ARGUMENT4U)


def fixed_opcodes(without: bytes = b"") -> bytes:
    """The pattern of an opcode of fixed width with its argument, but those `without` and the last of a pickle."""
    kinds = []
    for width in sorted({width for width in WIDTHS if width >= 0}):
        known = (c for c in range(256) if WIDTHS[c] == width and c != STOP and c not in without)
        if codes := b"".join(re.escape(bytes([c])) for c in known):
            kinds.append(b"[" + codes + b"]" + b".{%d}" % width)
    return b"|".join(kinds)


# As many as follow each other: nearly all of a snapshot.
_FIXED_RUN = re.compile(b"(?:" + _PAIR + b"|" + fixed_opcodes() + b"){0,10000}+", re.DOTALL)


def _walk(data: bytes) -> None:
    """Check that every opcode and its argument lie within `data`, and that memo indices and numbers are not huge."""
    size, at, num_tuples = len(data), 0, 0
    skip = _FIXED_RUN.match
    while at < size:
        code = data[at]
        if code == STOP:
            return
        found = skip(data, at)
        if found is not None and found.end() > at:
            at = found.end()
            continue
        num_tuples += WIDTHS[code] == _TUPLE
        at = after_opcode(data, at)
        if num_tuples > MOST_TUPLES:
            raise BrokenPickle(f"it has more than {MOST_TUPLES:,} tuples")
    raise BrokenPickle("it is truncated")


def after_opcode(data: bytes, at: int) -> int:
    """Return where the opcode at `at` of `data` and its argument end; it is not the last one.
    Raises BrokenPickle: it is none, or its argument is cut off or huge."""
    code = data[at]
    width, size = WIDTHS[code], len(data)
    at += 1
    if width >= 0:
        return at + width
    if width == _TUPLE:
        return at
    if width == _LONG:
        if data[at : at + 1] > bytes([_LONG_BYTES]):
            raise BrokenPickle("a number in it has more than 64 bits")
        return at + (1 + data[at] if at < size else 1)
    if width == pickletools.TAKEN_FROM_ARGUMENT1:
        return at + (1 + data[at] if at < size else 1)
    if width in _FOUR:
        return at + 4 + int.from_bytes(data[at : at + 4], "little")
    if width == pickletools.TAKEN_FROM_ARGUMENT8U:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    if width == _INDEX4:
        if int.from_bytes(data[at : at + 4], "little") > size:
            raise BrokenPickle(_LIES)
        return at + 4
    if width == _UNKNOWN:
        raise BrokenPickle(f"byte {at - 1} is no pickle opcode")
    for _ in range(2 if width == _TWO_LINES else 1):
        end = data.find(b"\n", at)
        if end < 0:
            raise BrokenPickle("it is truncated")
        if code == ord("p") and (end - at > 12 or not data[at:end].isdigit() or int(data[at:end]) > size):
            raise BrokenPickle(_LIES)
        if width == _NUMBER and end - at > _NUMBER_CHARACTERS:
            raise BrokenPickle("a number in it has more than 64 bits")
        at = end + 1
    return at
