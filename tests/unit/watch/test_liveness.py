"""Whether a running function will read the value that a variable has: `x` where `here()` is called."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any

import pytest

from memprof.watch.liveness import may_read, reads_global

BEHIND = "x = 1\nhere()\nprint(x)"
UNUSED = "x = 1\nprint(x)\nhere()"
DELETED = "x = 1\nhere()\ndel x"
A_NAME_ELSEWHERE = "x = 1\nhere()\nprint('x')\nprint(int.x if 0 else 1)"
MADE_ANEW = "for i in (1, 2):\n    x = here()\n    print(x)"
USED_AFTER_THE_LOOP = "x = 1\nfor i in (1, 2):\n    here()\nprint(x)"
USED_IN_EACH_ROUND = "x = 1\nfor i in (1, 2):\n    print(x)\n    here()"
USED_IN_SOME_ROUNDS = "x = 1\ni = 0\nwhile i < 2:\n    if i == 1:\n        print(x)\n    here()\n    i += 1"
USED_IN_THE_OUTER_LOOP = "x = 1\nfor i in (1, 2):\n    print(x)\n    for j in (1, 2):\n        here()"
MADE_IN_THE_OUTER_LOOP = "for i in (1, 2):\n    x = 1\n    print(x)\n    for j in (1, 2):\n        here()"
MADE_IN_SOME_ROUNDS = "x = 1\nfor i in (1, 2):\n    here()\n    if i == 1:\n        x = 1\n        print(x)\n{}"
MADE_IN_BOTH_BRANCHES = "x = i = 1\nhere()\nif i:\n    x = 2\nelse:\n    x = 3\nprint(x)"
MADE_IN_ONE_BRANCH = "x = i = 1\nhere()\nif i:\n    x = 2\nprint(x)"
MADE_BEFORE_BREAK = "i = 1\nwhile i < 9:\n    if i == 5:\n        break\n    x = here()\n    i += 1\nprint(x)"
MADE_BEHIND_A_HANDLER = (
    "for i in (1, 2):\n    here()\n    try:\n        int(i)\n    except ValueError:\n        i = 0\n    x = i\nprint(x)"
)
OF_A_FUNCTION_WITHIN = "x = 1\ndef inner():\n    print(x)\nhere()"


@pytest.mark.parametrize("in_a_function", [True, False])
@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        (BEHIND, True),
        (UNUSED, False),
        (DELETED, False),
        (A_NAME_ELSEWHERE, False),
        (MADE_ANEW, False),
        (USED_AFTER_THE_LOOP, True),
        (USED_IN_EACH_ROUND, True),
        (USED_IN_SOME_ROUNDS, True),
        (USED_IN_THE_OUTER_LOOP, True),
        (MADE_IN_THE_OUTER_LOOP, False),
        (MADE_IN_SOME_ROUNDS.format("print(x)"), True),
        (MADE_IN_SOME_ROUNDS.format(""), False),
        (MADE_IN_BOTH_BRANCHES, False),
        (MADE_IN_ONE_BRANCH, True),
        (MADE_BEFORE_BREAK, False),
        (MADE_BEHIND_A_HANDLER, False),
    ],
)
def test_the_first_instruction_that_follows_decides(source: str, is_read: bool, in_a_function: bool) -> None:
    assert look(source, in_a_function) == is_read


def test_functions_within_may_read_a_variable() -> None:
    assert look(OF_A_FUNCTION_WITHIN, in_a_function=True)


def test_globals_that_a_function_reads() -> None:
    def function(other: Any) -> Any:
        return KEPT, other.attribute

    assert reads_global(function.__code__, "KEPT") and not reads_global(function.__code__, "attribute")


KEPT = 1


def look(source: str, in_a_function: bool) -> bool:
    """Return the answer at the first call of `here()` in `source`, the body of a function or of a module."""
    answers: list[bool] = []

    def here() -> None:
        frame: FrameType = sys._getframe(1)
        answers.append(may_read(frame.f_code, frame.f_lasti, "x"))

    if in_a_function:
        source = "def function():\n    " + source.replace("\n", "\n    ") + "\nfunction()"
    exec(source, {"here": here, "print": lambda value: None})
    return answers[0]


def test_nothing_is_read_after_the_last_instruction() -> None:
    code = compile("x = 1\nx", "a.py", "exec")
    last = [instruction.offset for instruction in dis.get_instructions(code)][-1]
    assert not may_read(code, last, "x")
