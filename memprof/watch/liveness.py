"""Test whether a running function will read the value that one of its variables has: liveness, of compilers."""

from __future__ import annotations

import dis
import re
from itertools import islice
from types import CodeType

# Instructions with a variable; Python 3.13 and later have some with two, in a tuple.
_OF_VARIABLES = re.compile("(LOAD|STORE|DELETE)_(FAST|NAME|GLOBAL|DEREF|CLASSDEREF|CLOSURE)")


def may_read(code: CodeType, offset: int, variable: str) -> bool:
    """Return whether `code`, which runs at the bytecode `offset`, may read the value that `variable` has now.

    Branches are followed both ways, and each loop through one more round of it before the code that comes after. On
    each path the first instruction with the variable decides.
    """
    if variable in code.co_cellvars:  # functions within this one may read it
        return True
    instructions = list(dis.get_instructions(code))
    position_at = {instruction.offset: position for position, instruction in enumerate(instructions)}
    jumps = [_find_jump(instruction, position_at) for instruction in instructions]
    # Position of a loop's first instruction -> of its last.
    loops = {target: position for position, target in enumerate(jumps) if target is not None and target <= position}
    # Each path has reached the instruction at a position, and has begun anew some of the loops around it.
    starts = (position for position, instruction in enumerate(instructions) if instruction.offset > offset)
    pending = [(start, frozenset[int]()) for start in islice(starts, 1)]  # none: the function is about to return
    seen = set(pending)
    while pending:
        position, repeated = pending.pop()
        instruction = instructions[position]
        if _OF_VARIABLES.match(instruction.opname):
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            if variable in names:
                if instruction.opname.startswith("LOAD_"):
                    return True
                continue
        target = jumps[position]
        for following in _list_following(instruction, position, target):
            begun = repeated
            if target is not None:  # only a jump begins a loop anew, or leaves it
                if following <= position:
                    begun |= {following}
                if any(begin <= position <= end < following and begin not in begun for begin, end in loops.items()):
                    continue
                begun &= {begin for begin, end in loops.items() if begin <= following <= end}
            path = following, begun
            if path not in seen:
                seen.add(path)
                pending.append(path)
    return False


def reads_global(code: CodeType, variable: str) -> bool:
    """Return whether `code` reads the global `variable`."""
    return variable in code.co_names and any(
        instruction.opname == "LOAD_GLOBAL" and instruction.argval == variable
        for instruction in dis.get_instructions(code)
    )


def _find_jump(instruction: dis.Instruction, position_at: dict[int, int]) -> int | None:
    """Return the position of the instruction to which this one may jump; None if it does not."""
    is_jump = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
    return position_at[instruction.argval] if is_jump else None


def _list_following(instruction: dis.Instruction, position: int, target: int | None) -> list[int]:
    """Return the positions of the instructions that may run after the one at `position`, which may jump to `target`."""
    name = instruction.opname
    if name.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")):
        return []
    is_conditional = name not in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
    return [*([position + 1] if is_conditional else []), *([] if target is None else [target])]
