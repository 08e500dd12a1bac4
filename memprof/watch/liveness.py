"""Test whether a running function will read the value that one of its variables has: liveness, of compilers."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from types import CodeType

# Instructions with a variable; Python 3.13 and later have some with two, in a tuple.
_OF_VARIABLES = re.compile("(LOAD|STORE|DELETE)_(FAST|NAME|GLOBAL|DEREF|CLASSDEREF|CLOSURE)")


def may_read(code: CodeType, offset: int, variable: str) -> bool:
    """Return whether `code`, which runs at the bytecode `offset`, may read the value that `variable` has now.

    The code is followed to the end of each loop that `offset` is in, the innermost first, through one more round of it,
    and to its end; branches are taken as they stand in the source. The first instruction with the variable decides.
    """
    if variable in code.co_cellvars:  # functions within this one may read it
        return True
    for instruction in _iterate_following(code, offset):
        if not _OF_VARIABLES.match(instruction.opname):
            continue
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if variable in names:
            return instruction.opname.startswith("LOAD_")
    return False


def reads_global(code: CodeType, variable: str) -> bool:
    """Return whether `code` reads the global `variable`."""
    return variable in code.co_names and any(
        instruction.opname == "LOAD_GLOBAL" and instruction.argval == variable
        for instruction in dis.get_instructions(code)
    )


def _iterate_following(code: CodeType, offset: int) -> Iterator[dis.Instruction]:
    instructions = list(dis.get_instructions(code))
    ends: dict[int, int] = {}  # first instruction of a loop around `offset` -> its last
    for instruction in instructions:
        is_jump_back = "JUMP_BACKWARD" in instruction.opname
        if is_jump_back and instruction.argval <= offset <= instruction.offset:
            ends[instruction.argval] = instruction.offset
    position = offset
    for begin in sorted(ends, reverse=True):
        yield from (one for one in instructions if position < one.offset <= ends[begin])
        yield from (one for one in instructions if begin <= one.offset <= ends[begin])
        position = max(position, ends[begin])
    yield from (one for one in instructions if one.offset > position)
