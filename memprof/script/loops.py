"""Number of training steps that a program will make, computed from the loops around its optimizer's step.

Only source code and the values of variables are used: a `for` over an object with a length, and counters that the
condition of a `while`, or of an `if` that leaves the loop, compares with a limit. For other loops the number is
unknown. No iterator is advanced, because that would consume it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import linecache
import math
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import FrameType
from typing import Any

from memprof.script import program
from memprof.watch.frames import read_local_variables
from memprof.watch.program_code import is_program

_Loop = ast.For | ast.AsyncFor | ast.While
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_ParsedLoop = tuple[tuple[str, int], _Loop, int, int]  # (name, line) of its function, loop, first and last line
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
    """A condition that ends a loop, and the progress toward it."""

    total: int | None  # total number of iterations, or the counter's limit; None: unknown
    done: int | None = None  # completed iterations, or the counter's current value; None: unknown
    is_counter: bool = False  # counts only if `done` grows between steps, because a variable may count anything


@dataclass(frozen=True, slots=True)
class Loop:
    """Loop around a training step: file and line, and the conditions that end the loop."""

    location: tuple[str, int]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Position in a program: the training step (from 1) that has ended, and the loops around it, outermost first."""

    step: int
    loops: tuple[Loop, ...]


def find_position(step: int, frame: FrameType | None) -> Position:
    """Return the position after training step `step`: the loops around the lines of `frame` and its callers."""
    loops: list[Loop] = []
    for caller in list_frames(frame):
        if is_program(caller.f_code):
            loops[:0] = _find_loops_around(caller)
    return Position(step, tuple(loops))


def list_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield `frame` and its callers, innermost first, up to memprof's own that run the program."""
    while frame is not None and frame.f_code.co_filename != program.__file__:
        yield frame
        frame = frame.f_back


def list_loop_texts(frame: FrameType | None) -> Iterator[str]:
    """Yield the source text of the outermost loop in each function that is running, of `frame` and its callers."""
    for _, lines, loop in _iterate_outermost_loops(frame):
        yield "".join(lines[loop.lineno - 1 : loop.end_lineno])


def list_texts_after_loops(frame: FrameType | None) -> Iterator[str]:
    """Yield the source text that follows these loops, to the end of each function."""
    for caller, lines, loop in _iterate_outermost_loops(frame):
        yield "".join(lines[loop.end_lineno : _find_last_line(caller)])


def list_periods(frame: FrameType | None, wanted: re.Pattern[str]) -> Iterator[int]:
    """Yield the numbers n of conditions `... % n ...` under which the loops around `frame` run code with `wanted`."""
    for caller, lines, loop in _iterate_outermost_loops(frame):
        variables = ChainMap(read_local_variables(caller), caller.f_globals)
        branches = (node for node in ast.walk(loop) if isinstance(node, ast.If))
        for branch in branches:
            text = "".join(lines[branch.body[0].lineno - 1 : branch.body[-1].end_lineno])
            for node in ast.walk(branch.test) if wanted.search(text) else ():
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                    period = _evaluate(node.right, variables)
                    if _is_count(period):
                        yield period


def _iterate_outermost_loops(frame: FrameType | None) -> Iterator[tuple[FrameType, list[str], _Loop]]:
    """Yield each function that is running in a loop, of `frame` and its callers, its file's lines and that loop."""
    for caller in list_frames(frame):
        if is_program(caller.f_code):
            lines = linecache.getlines(caller.f_code.co_filename, caller.f_globals)
            outermost = next(_select_loops(caller, _parse_loops("".join(lines)) or ()), None)
            if outermost is not None:
                yield caller, lines, outermost


def _find_last_line(frame: FrameType) -> int:
    """Return the number of the last line of the function that `frame` runs."""
    return max((line for *_, line in frame.f_code.co_lines() if line is not None), default=0)


def count_loops_that_repeat(frame: FrameType | None, lines: Collection[tuple[str, int]]) -> int:
    """Return how many of the loops around `frame`, the outermost ones, run one of `lines` (file, number) again in each
    round: themselves, or in a function that is running in their body."""
    count, is_within = 0, False
    for caller in list_frames(frame):
        code = caller.f_code
        if not is_program(code):
            continue
        numbers = [number for file, number in lines if file == code.co_filename]
        text = "".join(linecache.getlines(code.co_filename, caller.f_globals))
        for loop in _select_loops(caller, _parse_loops(text) or ()):
            count += is_within or any(loop.lineno <= number <= (loop.end_lineno or number) for number in numbers)
        is_within |= any(code.co_firstlineno <= number <= _find_last_line(caller) for number in numbers)
    return count


def is_last_round(loop: Loop) -> bool:
    """Return whether `loop`, a `for` of known length, is in its last round."""
    bound = loop.bounds[0] if loop.bounds else Bound(None)
    return bound.total is not None and not bound.is_counter and (bound.done or 0) + 1 >= bound.total


def count_rounds_left(position: Position) -> tuple[int, int] | None:
    """Return how many iterations of its innermost loop, a `for` of known length, `position` has made, and how many are
    to come; None if that is not known.

    Where the loop's variable does not tell its iteration, that of a first pass is the training step.
    """
    bounds = position.loops[-1].bounds if position.loops else ()
    if not bounds or bounds[0].is_counter or bounds[0].total is None:
        return None
    done = position.step if bounds[0].done is None else bounds[0].done + 1
    return (done, bounds[0].total - done) if done <= bounds[0].total else None


def estimate_total_steps(earlier_positions: Sequence[Position], last_position: Position) -> int | None:
    """Return an upper estimate of the program's total training steps; None if the loops do not determine a total.

    `earlier_positions` are positions after earlier steps. At most one step per iteration is assumed.
    """
    locations = [loop.location for loop in last_position.loops]
    matching = (p for p in earlier_positions if locations and [loop.location for loop in p.loops] == locations)
    earlier = next(matching, None)
    if earlier is None:
        return None
    bounds = [_find_earliest_bound(old, loop) for old, loop in zip(earlier.loops, last_position.loops, strict=True)]
    totals = [bound.total for _, bound in bounds if bound.total]
    if len(totals) < len(bounds):
        return None
    earlier_fraction, _ = _compute_fractions(totals, [done for done, _ in bounds])
    done_fraction, current_fraction = _compute_fractions(totals, [bound.done for _, bound in bounds])
    if done_fraction > earlier_fraction:
        remaining = max(1 - done_fraction - current_fraction, 0)
        return last_position.step + round(
            remaining * (last_position.step - earlier.step) / (done_fraction - earlier_fraction)
        )
    num_iterations = math.prod(totals)
    return num_iterations if num_iterations >= last_position.step else None


def estimate_round_ends(
    earlier_positions: Sequence[Position], last_position: Position
) -> Iterator[tuple[Loop, int | None]]:
    """Yield each loop around `last_position`, outermost first, and the training step with which it ends for the first
    time, an upper estimate as above."""
    for depth, loop in enumerate(last_position.loops):
        inner = [dataclasses.replace(one, loops=one.loops[depth:]) for one in (*earlier_positions, last_position)]
        yield loop, estimate_total_steps(inner[:-1], inner[-1])


def _find_earliest_bound(earlier_loop: Loop, loop: Loop) -> tuple[int | None, Bound]:
    """Return (earlier `done`, bound) for the bound of `loop` that is reached first, unknown if there is none."""
    candidates = [
        (earlier_bound.done, bound)
        for earlier_bound, bound in zip(earlier_loop.bounds, loop.bounds, strict=True)
        if bound.total is not None and not (bound.is_counter and (earlier_bound.done or 0) >= (bound.done or 0))
    ]
    return min(candidates, key=lambda pair: (pair[1].total or 0) - (pair[1].done or 0), default=(None, Bound(None)))


def _compute_fractions(totals: Sequence[int], done: Sequence[int | None]) -> tuple[float, float]:
    """Return the fractions (completed, of one iteration) of nested loops with `totals` and `done`, outermost first."""
    done_fraction, iteration_fraction = 0.0, 1.0
    for total, num_done in zip(totals, done, strict=True):
        if num_done is None:
            return done_fraction, 0.0
        iteration_fraction /= total
        done_fraction += num_done * iteration_fraction
    return done_fraction, iteration_fraction


def _find_loops_around(frame: FrameType) -> Iterator[Loop]:
    """Yield the loops around the current line of `frame` in the frame's function, outermost first."""
    code = frame.f_code
    if code.co_name == "<lambda>":
        return
    linecache.checkcache(code.co_filename)  # another file may have had this name
    loops = _parse_loops("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if loops is None or code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"):
        yield Loop((code.co_filename, frame.f_lineno))  # a loop without known bounds
        return
    variables: Mapping[str, Any] | None = None
    for node in _select_loops(frame, loops):
        if variables is None:
            variables = ChainMap(read_local_variables(frame), frame.f_globals)
        yield Loop((code.co_filename, node.lineno), tuple(_find_bounds(node, variables)))


def _select_loops(frame: FrameType, loops: Iterable[_ParsedLoop]) -> Iterator[_Loop]:
    """Yield those of the `loops` of a file that the current line of `frame` is in, outermost first."""
    code = frame.f_code
    current_function = (code.co_name, 0 if code.co_name == "<module>" else code.co_firstlineno)
    for function, node, first_line, last_line in loops:
        if function == current_function and first_line <= frame.f_lineno <= last_line:
            yield node


@functools.lru_cache(maxsize=16)
def _parse_loops(text: str) -> tuple[_ParsedLoop, ...] | None:
    """Return ((name, line) of the function, loop, first line, last line) of each loop in source `text`.

    Returns None if `text` is empty or no Python source.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    loops: list[_ParsedLoop] = []

    def visit(node: ast.AST, function: tuple[str, int]) -> None:
        if isinstance(node, _Function | ast.ClassDef):
            function = (node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
        elif isinstance(node, _Loop):
            loops.append((function, node, node.body[0].lineno, node.body[-1].end_lineno or node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, ("<module>", 0))
    return tuple(loops) if tree.body else None


def _find_bounds(loop: _Loop, variables: Mapping[str, Any]) -> Iterator[Bound]:
    if isinstance(loop, ast.While):
        yield from _find_counters(loop.test, variables, ends_loop=False)
    else:
        yield Bound(_count_iterations(loop.iter, variables), _count_done_iterations(loop.target, loop.iter, variables))
    for test in _find_exit_tests(loop.body, is_inner=False):
        yield from _find_counters(test, variables, ends_loop=True)


def _find_exit_tests(body: Sequence[ast.stmt], *, is_inner: bool) -> Iterator[ast.expr]:
    """Yield the condition of each `if` in `body` that leaves the loop by `break`, `return` or `exit()`.
    `is_inner` says that `body` is in a nested loop, where a `break` does not leave the outer one."""
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            continue
        if isinstance(node, ast.If):  # the inner statements may never run
            if any(_leaves_loop(statement, is_inner=is_inner) for statement in node.body):
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
    """Yield the bounds of counters that `test` compares with limits; `ends_loop`: a true `test` ends the loop."""
    # Each part of an `or` is enough to leave the loop, each part of an `and` to end the loop's condition.
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if ends_loop else ast.And):
        for operand in test.values:
            yield from _find_counters(operand, variables, ends_loop=ends_loop)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    comparison: type | None = type(test.ops[0]) if ends_loop else _OPPOSITE.get(type(test.ops[0]))
    if comparison not in _END_COMPARISONS:
        return
    side, excess = _END_COMPARISONS[comparison]
    left, right = _evaluate(test.left, variables), _evaluate(test.comparators[0], variables)
    done, limit = (left, right) if side == "left" else (right, left)
    # One bound for each condition, so that two positions in a loop have equally many.
    is_known = _is_count(done) and _is_count(limit)
    yield Bound(limit + excess, done, True) if is_known else Bound(None, is_counter=True)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _get_called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _evaluate(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression, None if unknown; of the program's code, only `__len__` methods are called."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return variables.get(node.id)
        case ast.Attribute():
            return inspect.getattr_static(_evaluate(node.value, variables), node.attr, None)
        case ast.Subscript(slice=ast.Constant(value=key)):
            container = _evaluate(node.value, variables)
            if type(container) is list and isinstance(key, int):  # such as sys.argv
                return container[key] if key < len(container) else None
            return container.get(key) if type(container) is dict else None
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _evaluate(node.left, variables), _evaluate(node.right, variables)
            if not (_is_count(left) and _is_count(right)) or (isinstance(node.op, ast.FloorDiv) and not right):
                return None
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.Call(args=[argument], keywords=[]) if _get_called_name(node) == "len":
            return _count_iterations(argument, variables)
        case ast.Call(args=[argument], keywords=[]) if _get_called_name(node) == "int":
            value = _evaluate(argument, variables)
            if isinstance(value, str):
                return int(value) if value.isdecimal() and len(value) < 18 else None
            return int(value) if isinstance(value, int | float) and abs(value) < 1e18 else None
    return None


def _evaluate_range(node: ast.expr, variables: Mapping[str, Any]) -> range | None:
    """Return the range that `node` creates by `range`, `trange` or `tqdm(range(...))`; None for other expressions."""
    if not isinstance(node, ast.Call):
        return _evaluate(node, variables) if isinstance(_evaluate(node, variables), range) else None
    if _get_called_name(node) in ("tqdm", "list") and node.args:
        return _evaluate_range(node.args[0], variables)
    arguments = [_evaluate(argument, variables) for argument in node.args[:3]]
    if _get_called_name(node) not in ("range", "trange") or not arguments or not all(map(_is_count, arguments)):
        return None
    return range(*arguments) if arguments[2:] != [0] else None


def _count_iterations(node: ast.expr, variables: Mapping[str, Any]) -> int | None:
    iteration_range = _evaluate_range(node, variables)
    if iteration_range is not None:
        return len(iteration_range)
    if isinstance(node, ast.Call):
        if _get_called_name(node) in _ITERATING_FUNCTIONS and node.args:
            return _count_iterations(node.args[0], variables)
        if _get_called_name(node) == "zip" and node.args:
            lengths = [_count_iterations(argument, variables) for argument in node.args]
            return None if None in lengths else min(argument for argument in lengths if argument is not None)
        return None
    value = _evaluate(node, variables)
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except Exception:  # the program's own method may raise anything
        return None


def _count_done_iterations(target: ast.expr, node: ast.expr, variables: Mapping[str, Any]) -> int | None:
    """Return the number of completed iterations of `for target in node`, from the value of `target`; None: unknown."""
    iteration_range = _evaluate_range(node, variables)
    if iteration_range is not None:
        value = _evaluate(target, variables)
        return iteration_range.index(value) if _is_count(value) and value in iteration_range else None
    if isinstance(node, ast.Call) and _get_called_name(node) == "enumerate" and isinstance(target, ast.Tuple):
        starts = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
        first = _evaluate(starts[0], variables) if starts else 0
        value = _evaluate(target.elts[0], variables)
        return max(value - first, 0) if _is_count(value) and _is_count(first) else None
    return None
