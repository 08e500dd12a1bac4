"""Training steps that a program will make, counted by the loops around its optimizer's step.

Only what the source says and its variables hold is used: `for` over something that has a length, and counters that are
compared with a limit by the head of a `while` or by an `if` that leaves the loop. Where a loop has neither, nothing is
known. No loop is gone through for this: an iterator would be used up.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import FrameType
from typing import Any

from memprof.script import program
from memprof.watch.frames import local_variables
from memprof.watch.program_code import is_program

_Loop = ast.For | ast.AsyncFor | ast.While
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Names of functions that give what they are given one by one, and of progress bars, which do too.
_PASSED_ON = frozenset({"enumerate", "reversed", "sorted", "list", "tuple", "iter", "tqdm"})
# Of what leaves a loop where it holds: the side of the counter, and how far beyond the limit it has to come.
_COUNTERS = {
    ast.Lt: ("right", 1), ast.LtE: ("right", 0), ast.Gt: ("left", 1), ast.GtE: ("left", 0), ast.Eq: ("left", 0),
}  # fmt: skip
_OPPOSITE: Mapping[type, type] = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """One way in which a loop ends."""

    total: int | None  # rounds in all, or the value of a counter; None: not known
    done: int | None = None  # rounds that are over, or the counter's value now; None: not known
    is_counter: bool = False  # it holds only where `done` is seen to grow, for a variable may count anything


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that a training step was made in: file and line, and the ways in which it ends."""

    place: tuple[str, int]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """A program's position: the number of the training step that ended, and the loops around it, outermost first."""

    step: int
    loops: tuple[Loop, ...]


def position(step: int, frame: FrameType | None) -> Position:
    """Read the loops around the line that `frame` is at, and around those that called it."""
    loops: list[Loop] = []
    while frame is not None and frame.f_code.co_filename != program.__file__:  # what runs the program is not its own
        if is_program(frame.f_code):
            loops[:0] = _loops_of(frame)
        frame = frame.f_back
    return Position(step, tuple(loops))


def planned_steps(earlier: Sequence[Position], now: Position) -> int | None:
    """Estimate how many training steps the program makes in all, at most; None where its loops do not tell.

    `earlier` are positions at the ends of steps before, `now` the last. One step per round is the most.
    """
    places = [loop.place for loop in now.loops]
    same = (one for one in earlier if places and [loop.place for loop in one.loops] == places)
    before = next(same, None)
    if before is None:
        return None
    bounds = [_earliest_bound(then, loop) for then, loop in zip(before.loops, now.loops, strict=True)]
    totals = [bound.total for _, bound in bounds if bound.total]
    if len(totals) < len(bounds):
        return None
    begun, _ = _share(totals, [done for done, _ in bounds])
    gone, round_now = _share(totals, [bound.done for _, bound in bounds])
    if gone > begun:
        left = max(1 - gone - round_now, 0)
        return now.step + round(left * (now.step - before.step) / (gone - begun))
    rounds = math.prod(totals)
    return rounds if rounds >= now.step else None


def _earliest_bound(then: Loop, loop: Loop) -> tuple[int | None, Bound]:
    """Return what was over earlier, and the bound that ends a loop first; one that is not known where none is."""
    known = [
        (early.done, bound)
        for early, bound in zip(then.bounds, loop.bounds, strict=True)
        if bound.total is not None and not (bound.is_counter and (early.done or 0) >= (bound.done or 0))
    ]
    return min(known, key=lambda one: (one[1].total or 0) - (one[1].done or 0), default=(None, Bound(None)))


def _share(totals: Sequence[int], done: Sequence[int | None]) -> tuple[float, float]:
    """Return what part of all rounds is over, as far inwards as that is known; and the part of this round."""
    share, part = 0.0, 1.0
    for total, over in zip(totals, done, strict=True):
        if over is None:
            return share, 0.0
        part /= total
        share += over * part
    return share, part


def _loops_of(frame: FrameType) -> Iterator[Loop]:
    """Yield the loops around the line that `frame` is at, in its own function."""
    code = frame.f_code
    if code.co_name == "<lambda>":
        return
    linecache.checkcache(code.co_filename)  # another file may have had this name
    loops = _loops_in("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if loops is None or code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"):
        yield Loop((code.co_filename, frame.f_lineno))  # one that nothing is known of
        return
    variables: Mapping[str, Any] | None = None
    here = (code.co_name, 0 if code.co_name == "<module>" else code.co_firstlineno)
    for function, node, first, last in loops:
        if function == here and first <= frame.f_lineno <= last:
            if variables is None:
                variables = ChainMap(local_variables(frame), frame.f_globals)
            yield Loop((code.co_filename, node.lineno), tuple(_bounds(node, variables)))


@functools.lru_cache(maxsize=16)
def _loops_in(text: str) -> tuple[tuple[tuple[str, int], _Loop, int, int], ...] | None:
    """Return a file's loops, outer first: name and line of the function around each, itself, its lines; or None."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    found: list[tuple[tuple[str, int], _Loop, int, int]] = []

    def visit(node: ast.AST, function: tuple[str, int]) -> None:
        if isinstance(node, _Function | ast.ClassDef):
            function = (node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)]))
        elif isinstance(node, _Loop):
            found.append((function, node, node.body[0].lineno, node.body[-1].end_lineno or node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, ("<module>", 0))
    return tuple(found) if tree.body else None


def _bounds(loop: _Loop, variables: Mapping[str, Any]) -> Iterator[Bound]:
    if isinstance(loop, ast.While):
        yield from _counters(loop.test, variables, leaves=False)
    else:
        yield Bound(_rounds(loop.iter, variables), _rounds_over(loop.target, loop.iter, variables))
    for test in _tests_to_leave(loop.body, is_inner=False):
        yield from _counters(test, variables, leaves=True)


def _tests_to_leave(body: Sequence[ast.stmt], *, is_inner: bool) -> Iterator[ast.expr]:
    """Yield conditions of each `if` that leaves the loop with this body: by `break`, or inside by `return`."""
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            continue
        if isinstance(node, ast.If):  # what is in it may never be reached
            if any(_leaves(one, is_inner=is_inner) for one in node.body):
                yield node.test
        else:
            yield from _tests_to_leave(getattr(node, "body", ()), is_inner=is_inner or isinstance(node, _Loop))


def _leaves(node: ast.stmt, *, is_inner: bool) -> bool:
    is_exit = (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name_of(node.value) in ("exit", "quit")
    )
    return is_exit or isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not is_inner)


def _counters(test: ast.expr, variables: Mapping[str, Any], *, leaves: bool) -> Iterator[Bound]:
    """Yield counters and limits of a condition at which a loop is left, or (`leaves` is False) goes on."""
    # One of several is enough: to leave where it is `or`, to go on no longer where it is `and`.
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if leaves else ast.And):
        for part in test.values:
            yield from _counters(part, variables, leaves=leaves)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    how: type | None = type(test.ops[0]) if leaves else _OPPOSITE.get(type(test.ops[0]))
    if how not in _COUNTERS:
        return
    side, beyond = _COUNTERS[how]
    left, right = _value(test.left, variables), _value(test.comparators[0], variables)
    done, limit = (left, right) if side == "left" else (right, left)
    # One bound for each condition, so that two readings of one loop have the same.
    is_known = _is_count(done) and _is_count(limit)
    yield Bound(limit + beyond, done, True) if is_known else Bound(None, is_counter=True)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _value(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return what an expression gives, without a call into the program but for lengths; None if that is not known."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return variables.get(node.id)
        case ast.Attribute():
            return inspect.getattr_static(_value(node.value, variables), node.attr, None)
        case ast.Subscript(slice=ast.Constant(value=key)):
            whole = _value(node.value, variables)
            return whole.get(key) if type(whole) is dict else None
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _value(node.left, variables), _value(node.right, variables)
            if not (_is_count(left) and _is_count(right)) or (isinstance(node.op, ast.FloorDiv) and not right):
                return None
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.Call(args=[only], keywords=[]) if _name_of(node) == "len":
            return _rounds(only, variables)
        case ast.Call(args=[only], keywords=[]) if _name_of(node) == "int":
            value = _value(only, variables)
            return int(value) if isinstance(value, int | float) and abs(value) < 1e18 else None
    return None


def _range(node: ast.expr, variables: Mapping[str, Any]) -> range | None:
    """Return what `range(...)`, `trange(...)` or a progress bar around it gives; None if it is another expression."""
    if not isinstance(node, ast.Call):
        return _value(node, variables) if isinstance(_value(node, variables), range) else None
    if _name_of(node) in ("tqdm", "list") and node.args:
        return _range(node.args[0], variables)
    given = [_value(one, variables) for one in node.args[:3]]
    if _name_of(node) not in ("range", "trange") or not given or not all(map(_is_count, given)):
        return None
    return range(*given) if given[2:] != [0] else None


def _rounds(node: ast.expr, variables: Mapping[str, Any]) -> int | None:
    counted = _range(node, variables)
    if counted is not None:
        return len(counted)
    if isinstance(node, ast.Call):
        if _name_of(node) in _PASSED_ON and node.args:
            return _rounds(node.args[0], variables)
        if _name_of(node) == "zip" and node.args:
            each = [_rounds(one, variables) for one in node.args]
            return None if None in each else min(one for one in each if one is not None)
        return None
    value = _value(node, variables)
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except Exception:  # the program's own method, which may raise anything, as a stream's does
        return None


def _rounds_over(target: ast.expr, node: ast.expr, variables: Mapping[str, Any]) -> int | None:
    """Return how many rounds of a `for` are over, by its variable that counts them."""
    counted = _range(node, variables)
    if counted is not None:
        value = _value(target, variables)
        return counted.index(value) if _is_count(value) and value in counted else None
    if isinstance(node, ast.Call) and _name_of(node) == "enumerate" and isinstance(target, ast.Tuple):
        starts = [*node.args[1:], *(one.value for one in node.keywords)]
        first = _value(starts[0], variables) if starts else 0
        value = _value(target.elts[0], variables)
        return max(value - first, 0) if _is_count(value) and _is_count(first) else None
    return None
