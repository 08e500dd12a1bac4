"""Number of training steps that a program will make, computed from the loops around its optimizer's step.

Only the source code and its variables' values are used: `for` over an object with a length, and counters that the head
of a `while`, or an `if` that leaves the loop, compares with a limit. The number is unknown for other loops. No iterator
is advanced, because that would consume it.
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
from memprof.watch.frames import read_local_variables
from memprof.watch.program_code import is_program

_Loop = ast.For | ast.AsyncFor | ast.While
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Names of functions and progress bars that yield the items of their argument.
_ITERATING_FUNCTIONS = frozenset({"enumerate", "reversed", "sorted", "list", "tuple", "iter", "tqdm"})
# Comparison that ends a loop -> side of the counter, and distance beyond the limit at which the comparison is true.
_END_COMPARISONS = {
    ast.Lt: ("right", 1), ast.LtE: ("right", 0), ast.Gt: ("left", 1), ast.GtE: ("left", 0), ast.Eq: ("left", 0),
}  # fmt: skip
_OPPOSITE: Mapping[type, type] = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """One condition that ends a loop."""

    total: int | None  # total rounds, or the counter's limit; None: unknown
    done: int | None = None  # rounds done, or the counter's current value; None: unknown
    is_counter: bool = False  # counts only if `done` grows between steps, because a variable may count anything


@dataclass(frozen=True, slots=True)
class Loop:
    """Loop around a training step: file and line, and the conditions that end the loop."""

    location: tuple[str, int]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a program: the number of the training step that ended, and the loops around it, outermost first."""

    step: int
    loops: tuple[Loop, ...]


def find_position(step: int, frame: FrameType | None) -> Position:
    """Return the position at `frame`: the loops around its current line, and around the lines of its callers."""
    loops: list[Loop] = []
    while frame is not None and frame.f_code.co_filename != program.__file__:  # memprof's frames are not the program's
        if is_program(frame.f_code):
            loops[:0] = _find_loops_around(frame)
        frame = frame.f_back
    return Position(step, tuple(loops))


def estimate_total_steps(earlier_positions: Sequence[Position], last_position: Position) -> int | None:
    """Return an upper estimate of the program's total training steps; None if the loops do not determine a total.

    `earlier_positions` are those at the ends of earlier steps. At most one step per round is assumed.
    """
    places = [loop.location for loop in last_position.loops]
    same = (one for one in earlier_positions if places and [loop.location for loop in one.loops] == places)
    before = next(same, None)
    if before is None:
        return None
    bounds = [_find_earliest_bound(then, loop) for then, loop in zip(before.loops, last_position.loops, strict=True)]
    totals = [bound.total for _, bound in bounds if bound.total]
    if len(totals) < len(bounds):
        return None
    earlier_fraction, _ = _compute_fractions(totals, [done for done, _ in bounds])
    done_fraction, round_now = _compute_fractions(totals, [bound.done for _, bound in bounds])
    if done_fraction > earlier_fraction:
        remaining = max(1 - done_fraction - round_now, 0)
        return last_position.step + round(
            remaining * (last_position.step - before.step) / (done_fraction - earlier_fraction)
        )
    rounds = math.prod(totals)
    return rounds if rounds >= last_position.step else None


def _find_earliest_bound(earlier_loop: Loop, loop: Loop) -> tuple[int | None, Bound]:
    """Return the earlier progress and the bound that ends a loop first; an unknown bound if there is none."""
    known = [
        (early.done, bound)
        for early, bound in zip(earlier_loop.bounds, loop.bounds, strict=True)
        if bound.total is not None and not (bound.is_counter and (early.done or 0) >= (bound.done or 0))
    ]
    return min(known, key=lambda one: (one[1].total or 0) - (one[1].done or 0), default=(None, Bound(None)))


def _compute_fractions(totals: Sequence[int], done: Sequence[int | None]) -> tuple[float, float]:
    """Return the fraction of all rounds that is done, down to the innermost known loop, and that of this round."""
    share, part = 0.0, 1.0
    for total, num_done in zip(totals, done, strict=True):
        if num_done is None:
            return share, 0.0
        part /= total
        share += num_done * part
    return share, part


def _find_loops_around(frame: FrameType) -> Iterator[Loop]:
    """Yield the loops around the current line of `frame`, within the frame's function."""
    code = frame.f_code
    if code.co_name == "<lambda>":
        return
    linecache.checkcache(code.co_filename)  # another file may have had this name
    loops = _parse_loops("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if loops is None or code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"):
        yield Loop((code.co_filename, frame.f_lineno))  # a loop without known bounds
        return
    variables: Mapping[str, Any] | None = None
    here = (code.co_name, 0 if code.co_name == "<module>" else code.co_firstlineno)
    for function, node, first, last in loops:
        if function == here and first <= frame.f_lineno <= last:
            if variables is None:
                variables = ChainMap(read_local_variables(frame), frame.f_globals)
            yield Loop((code.co_filename, node.lineno), tuple(_find_bounds(node, variables)))


@functools.lru_cache(maxsize=16)
def _parse_loops(text: str) -> tuple[tuple[tuple[str, int], _Loop, int, int], ...] | None:
    """Return a file's loops, outer first: (name, line) of the function, loop, first and last line; None: no source."""
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


def _find_bounds(loop: _Loop, variables: Mapping[str, Any]) -> Iterator[Bound]:
    if isinstance(loop, ast.While):
        yield from _find_counters(loop.test, variables, ends_loop=False)
    else:
        yield Bound(_count_rounds(loop.iter, variables), _count_done_rounds(loop.target, loop.iter, variables))
    for test in _find_exit_tests(loop.body, is_inner=False):
        yield from _find_counters(test, variables, ends_loop=True)


def _find_exit_tests(body: Sequence[ast.stmt], *, is_inner: bool) -> Iterator[ast.expr]:
    """Yield the condition of each `if` that leaves the loop with this body, by `break`, `return` or `exit()`."""
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            continue
        if isinstance(node, ast.If):  # the inner statements may never run
            if any(_leaves_loop(one, is_inner=is_inner) for one in node.body):
                yield node.test
        else:
            yield from _find_exit_tests(getattr(node, "body", ()), is_inner=is_inner or isinstance(node, _Loop))


def _leaves_loop(node: ast.stmt, *, is_inner: bool) -> bool:
    is_exit = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _get_called_name(node.value) in ("exit", "quit")
    )
    return is_exit or isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not is_inner)


def _find_counters(test: ast.expr, variables: Mapping[str, Any], *, ends_loop: bool) -> Iterator[Bound]:
    """Yield bounds for counters and limits in a condition that ends a loop, or (not `ends_loop`) continues it."""
    # Each part of an `or` is enough to leave the loop, each part of an `and` to end the loop's condition.
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if ends_loop else ast.And):
        for part in test.values:
            yield from _find_counters(part, variables, ends_loop=ends_loop)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    comparison: type | None = type(test.ops[0]) if ends_loop else _OPPOSITE.get(type(test.ops[0]))
    if comparison not in _END_COMPARISONS:
        return
    side, excess = _END_COMPARISONS[comparison]
    left_value, right = _evaluate(test.left, variables), _evaluate(test.comparators[0], variables)
    done, limit = (left_value, right) if side == "left" else (right, left_value)
    # One bound for each condition, so that two readings of one loop have the same.
    is_known = _is_count(done) and _is_count(limit)
    yield Bound(limit + excess, done, True) if is_known else Bound(None, is_counter=True)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _get_called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _evaluate(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression, None if unknown; the only calls into the program are for lengths."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return variables.get(node.id)
        case ast.Attribute():
            return inspect.getattr_static(_evaluate(node.value, variables), node.attr, None)
        case ast.Subscript(slice=ast.Constant(value=key)):
            whole = _evaluate(node.value, variables)
            return whole.get(key) if type(whole) is dict else None
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left_value, right = _evaluate(node.left, variables), _evaluate(node.right, variables)
            if not (_is_count(left_value) and _is_count(right)) or (isinstance(node.op, ast.FloorDiv) and not right):
                return None
            return _ARITHMETIC[type(node.op)](left_value, right)
        case ast.Call(args=[only], keywords=[]) if _get_called_name(node) == "len":
            return _count_rounds(only, variables)
        case ast.Call(args=[only], keywords=[]) if _get_called_name(node) == "int":
            value = _evaluate(only, variables)
            return int(value) if isinstance(value, int | float) and abs(value) < 1e18 else None
    return None


def _evaluate_range(node: ast.expr, variables: Mapping[str, Any]) -> range | None:
    """Return the range of `range(...)`, `trange(...)` or a progress bar around these; None for other expressions."""
    if not isinstance(node, ast.Call):
        return _evaluate(node, variables) if isinstance(_evaluate(node, variables), range) else None
    if _get_called_name(node) in ("tqdm", "list") and node.args:
        return _evaluate_range(node.args[0], variables)
    given = [_evaluate(one, variables) for one in node.args[:3]]
    if _get_called_name(node) not in ("range", "trange") or not given or not all(map(_is_count, given)):
        return None
    return range(*given) if given[2:] != [0] else None


def _count_rounds(node: ast.expr, variables: Mapping[str, Any]) -> int | None:
    rounds_range = _evaluate_range(node, variables)
    if rounds_range is not None:
        return len(rounds_range)
    if isinstance(node, ast.Call):
        if _get_called_name(node) in _ITERATING_FUNCTIONS and node.args:
            return _count_rounds(node.args[0], variables)
        if _get_called_name(node) == "zip" and node.args:
            each = [_count_rounds(one, variables) for one in node.args]
            return None if None in each else min(one for one in each if one is not None)
        return None
    value = _evaluate(node, variables)
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except Exception:  # the program's own method may raise anything
        return None


def _count_done_rounds(target: ast.expr, node: ast.expr, variables: Mapping[str, Any]) -> int | None:
    """Return how many rounds of a `for` are done, by its counting variable."""
    rounds_range = _evaluate_range(node, variables)
    if rounds_range is not None:
        value = _evaluate(target, variables)
        return rounds_range.index(value) if _is_count(value) and value in rounds_range else None
    if isinstance(node, ast.Call) and _get_called_name(node) == "enumerate" and isinstance(target, ast.Tuple):
        starts = [*node.args[1:], *(one.value for one in node.keywords)]
        first = _evaluate(starts[0], variables) if starts else 0
        value = _evaluate(target.elts[0], variables)
        return max(value - first, 0) if _is_count(value) and _is_count(first) else None
    return None
