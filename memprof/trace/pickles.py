"""Loads pickles that hold only plain values: without constructing objects or importing names, and in bounded time.

The unpickler of the standard library executes the instructions of a file. Here every name in a file is rejected. The
opcodes are checked before anything is built, so that a wrong size or index cannot allocate memory, and thousands of
keys with one hash cannot take forever. The caller limits memory: MemoryError is not caught.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

_SIZE_ERROR = "a size in it is larger than the file"


class ForbiddenGlobal(Exception):
    """The pickle requests the import of a name; `args[0]` is the name."""


class BrokenPickle(Exception):
    """The bytes are no complete pickle; `args[0]` is the reason."""


class NotRegular(Exception):
    """The events cannot be parsed from the bytes (trace/pickled_events.py): use `load_plain` for this file."""


def load_plain(data: bytes) -> object:
    """Return the value in the pickle `data`: dicts, lists, tuples, strings, bytes, numbers of 64 bits, booleans, None.
    Raises ForbiddenGlobal: the pickle has another type; BrokenPickle: it is truncated, damaged or no pickle."""
    _check_opcodes(data)
    try:
        return PlainUnpickler(io.BytesIO(data)).load()
    except (ForbiddenGlobal, MemoryError):
        raise
    except Exception as error:  # the standard library raises nearly any exception for a damaged pickle
        raise BrokenPickle(str(error) or type(error).__name__) from None


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that rejects every global name and persistent id."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Raise ForbiddenGlobal for every name."""
        raise ForbiddenGlobal(f"{module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        """Raise ForbiddenGlobal for every persistent id."""
        raise ForbiddenGlobal(f"persistent id {pid!r}")


_UNKNOWN, _TWO_LINES, _INDEX4, _TUPLE, _LONG, _NUMBER = -100, -101, -102, -103, -104, -105
_LONG_BYTES = 9  # bytes of a number with its sign: any number of longer ones can share a hash
_NUMBER_CHARACTERS = 24
MAX_TUPLES = 10_000  # without pairs of short numbers (pool ids): any number of other tuples can share a hash
_EXCLUDED_OPCODES = ("EMPTY_SET", "FROZENSET", "LONG4")
_SHORT_INTEGER = rb"(?:K.|M..|J....)"
_INTEGER_PAIR = rb"%b{2}\x86|\(%b{2}t" % (_SHORT_INTEGER, _SHORT_INTEGER)


def _build_widths() -> list[int]:
    """Return for each opcode the bytes of its argument, or a negative code (as in pickletools) if the length varies."""
    widths = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        if opcode.name not in _EXCLUDED_OPCODES:
            widths[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    for code, width in (("c", _TWO_LINES), ("i", _TWO_LINES), ("r", _INDEX4), ("I", _NUMBER), ("L", _NUMBER)):
        widths[ord(code)] = width
    for code in "t\x85\x86\x87":
        widths[ord(code)] = _TUPLE
    widths[0x8A] = _LONG
    return widths


WIDTHS = _build_widths()
STOP = ord(".")
_FOUR_BYTE_LENGTHS = (pickletools.TAKEN_FROM_ARGUMENT4, pickletools.TAKEN_FROM_ARGUMENT4U)


def build_fixed_opcode_pattern(without: bytes = b"") -> bytes:
    """Return a regular expression for an opcode of fixed width, with its argument; not STOP or those in `without`."""
    patterns = []
    for width in sorted({width for width in WIDTHS if width >= 0}):
        matching = (c for c in range(256) if WIDTHS[c] == width and c != STOP and c not in without)
        if codes := b"".join(re.escape(bytes([c])) for c in matching):
            patterns.append(b"[" + codes + b"]" + b".{%d}" % width)
    return b"|".join(patterns)


# A run of such opcodes: nearly all of a snapshot.
_FIXED_RUN = re.compile(b"(?:" + _INTEGER_PAIR + b"|" + build_fixed_opcode_pattern() + b"){0,10000}+", re.DOTALL)


def _check_opcodes(data: bytes) -> None:
    """Raise BrokenPickle if an opcode or its argument exceeds `data`, or a memo index or integer is huge."""
    size, position, num_tuples = len(data), 0, 0
    match_run = _FIXED_RUN.match
    while position < size:
        code = data[position]
        if code == STOP:
            return
        match = match_run(data, position)
        if match is not None and match.end() > position:
            position = match.end()
            continue
        num_tuples += WIDTHS[code] == _TUPLE
        position = skip_opcode(data, position)
        if num_tuples > MAX_TUPLES:
            raise BrokenPickle(f"it has more than {MAX_TUPLES:,} tuples")
    raise BrokenPickle("it is truncated")


def skip_opcode(data: bytes, at: int) -> int:
    """Return the position after the opcode at `at` of `data` and its argument; the opcode is not STOP. Raises
    BrokenPickle: the byte is no opcode, or its argument is cut off or huge."""
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
    if width in _FOUR_BYTE_LENGTHS:
        return at + 4 + int.from_bytes(data[at : at + 4], "little")
    if width == pickletools.TAKEN_FROM_ARGUMENT8U:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    if width == _INDEX4:
        if int.from_bytes(data[at : at + 4], "little") > size:
            raise BrokenPickle(_SIZE_ERROR)
        return at + 4
    if width == _UNKNOWN:
        raise BrokenPickle(f"byte {at - 1} is no pickle opcode")
    for _ in range(2 if width == _TWO_LINES else 1):
        end = data.find(b"\n", at)
        if end < 0:
            raise BrokenPickle("it is truncated")
        if code == ord("p") and (end - at > 12 or not data[at:end].isdigit() or int(data[at:end]) > size):
            raise BrokenPickle(_SIZE_ERROR)
        if width == _NUMBER and end - at > _NUMBER_CHARACTERS:
            raise BrokenPickle("a number in it has more than 64 bits")
        at = end + 1
    return at
