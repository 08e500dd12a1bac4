"""Source lines of the program: those that fill a container or sum, assign to a variable, or only display values."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import re
from collections.abc import Collection, Iterable, Iterator
from types import CodeType

_FILLING_METHODS = "append|appendleft|extend|insert|add|update|setdefault|put"

# Methods of tensors that compute a value in place, from itself or from others; not those that only begin it.
_IN_PLACE_METHODS = r"(?:add|sub|mul|div|lerp|copy|addcmul|addcdiv|index_add|index_copy|index_put|scatter|scatter_add)_"

# Instructions that assign to a variable; Python 3.13 joins two, with the names of both.
_STORES = (
    "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST",
)  # fmt: skip

# Functions and methods that only display values: of loggers, tensorboard, wandb, progress bars.
_DISPLAY_FUNCTIONS = {
    *("print", "log", "debug", "info", "warning", "warn", "error", "critical", "write"),
    *("add_scalar", "add_scalars", "log_metrics"),
    *("set_postfix", "set_postfix_str", "set_description", "set_description_str"),
}


def is_display_statement(source: str) -> bool:
    """Return whether `source` (`file:line function`) is in a statement that only displays values.

    A value that such a statement reads does not affect the rest of the program.
    """
    file, _, number = source.rpartition(" ")[0].rpartition(":")
    linecache.checkcache(file)
    return any(first <= int(number) <= last for first, last in _find_display_lines("".join(linecache.getlines(file))))


@functools.lru_cache(maxsize=16)
def _find_display_lines(source_text: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse(source_text)
    except (SyntaxError, ValueError):
        return ()
    ranges = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _DISPLAY_FUNCTIONS:
                ranges.append((node.lineno, node.end_lineno or node.lineno))
    return tuple(ranges)


def list_unused_no_grads(file: str) -> list[str]:
    """Return `file:line function` of the statements of `file` that only call torch.no_grad() or inference_mode(): such
    a call changes nothing without `with`."""
    linecache.checkcache(file)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    functions: dict[ast.AST, str] = {tree: "<module>"}
    lines = []
    for node in ast.walk(tree):  # a function before what is in it
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else functions[node]
        functions.update(dict.fromkeys(ast.iter_child_nodes(node), inside))
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in ("no_grad", "inference_mode"):
                lines.append(f"{file}:{node.lineno} {inside}")
    return lines


def find_fill_line(
    code: CodeType,
    variable: str,
    *,
    is_attribute: bool,
    keys: str = "",
    is_any_key: bool = False,
    in_place: bool = False,
) -> str | None:
    """Return `file:line function` of the first line of `code` that adds to `variable`; None if there is none.

    `code` is of a function or an entire module. `is_attribute`: whether `variable` is an attribute (`self.losses`).
    `keys` are the keys of the inner container, such as `['train']['loss']`, which the line must include; with
    `is_any_key` one that the program computes may follow, and none that it writes out: that is another item's.
    `in_place`: whether it is the object that has to change, and not only the variable.
    """
    name_regex = (r"\." if is_attribute else r"(?<![\w.])") + re.escape(variable)
    name_regex += re.escape(keys).replace("'", "[\"']") + (r"(?!\[[\"'])" if is_any_key else "")
    bounded_name_regex = rf"{name_regex}(?!\w)"
    assigned = rf"{name_regex}(?:\s*,\s*[\w.]+)*\s*(?::[^=]+)?=(?!=)"  # `h = `, `h, c = `, `h: Tensor = `
    in_place_patterns = (
        rf"{name_regex}(?:\[[^\]]*\])*\.(?:{_FILLING_METHODS})\(",
        rf"{name_regex}(?:\[[^\]]*\])+\s*[+|]?=(?!=)",
        rf"{name_regex}\s*(?:\+|\|)=",
        rf"{name_regex}\.{_IN_PLACE_METHODS}\(",
    )
    assigning_patterns = (
        # A line that detaches the earlier value of a state is not the one that carries its graph on.
        rf"{assigned}(?!.*\.detach).*{bounded_name_regex}",
        rf"{assigned}.*{bounded_name_regex}",
    )
    patterns = in_place_patterns if in_place else in_place_patterns + assigning_patterns
    others = set() if is_attribute else set(_iterate_lines_of_others(code, variable))
    return next((line for pattern in patterns if (line := find_line(code, pattern, others)) is not None), None)


def _iterate_lines_of_others(code: CodeType, variable: str) -> Iterator[int]:
    """Yield the lines of functions within `code` that have a variable of this name of their own."""
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        if variable in (*inner.co_varnames, *inner.co_cellvars) and not inner.co_name.startswith("<"):
            yield from range(inner.co_firstlineno, _find_last_line(inner) + 1)
        else:
            yield from _iterate_lines_of_others(inner, variable)


def find_line(code: CodeType, pattern: str, skipped: Collection[int] = ()) -> str | None:
    """Return `file:line function` of the first line of `code`, without those `skipped`, that matches the regex
    `pattern`; None if none does."""
    lines = linecache.getlines(code.co_filename)
    for line_number in range(code.co_firstlineno, min(_find_last_line(code), len(lines)) + 1):
        if line_number not in skipped and re.search(pattern, lines[line_number - 1].partition("#")[0]):
            return f"{code.co_filename}:{line_number} {code.co_name}"
    return None


def list_assignment_lines(code: CodeType, variable: str) -> list[str]:
    """Return `file:line function` of the lines of `code` that assign to `variable`, in their order there."""
    lines = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _STORES and instruction.positions is not None:
            stored = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            if variable in stored:
                lines.append(f"{code.co_filename}:{instruction.positions.lineno} {code.co_name}")
    return lines


def list_attribute_lines(codes: Iterable[CodeType], attribute: str) -> list[str]:
    """Return `file:line function` of the lines of `codes`, and of the functions within them, that assign to an
    attribute of this name (`x.attribute = ...`), each once."""
    pending, lines = list(codes), dict[str, None]()
    while pending:
        current = pending.pop(0)
        pending += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(current):
            if instruction.opname == "STORE_ATTR" and instruction.argval == attribute and instruction.positions:
                lines[f"{current.co_filename}:{instruction.positions.lineno} {current.co_name}"] = None
    return list(lines)


def read_line(source: str) -> str:
    """Return the text of the line `source` (`file:line function`); "" if the source code is not available."""
    file, _, number = source.rpartition(" ")[0].rpartition(":")
    return linecache.getline(file, int(number))


def find_attribute_line(codes: Iterable[CodeType], attribute: str) -> str | None:
    """Return the only one of the lines of `list_attribute_lines`; None if there is none, or several."""
    lines = list_attribute_lines(codes, attribute)
    return lines[0] if len(lines) == 1 else None


def format_code_line(code: CodeType) -> str:
    """Return `file:line function` of the first line of the function with this `code`."""
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"


def find_class_line(kind: type) -> str | None:
    """Return `file:line class` of the first line of class `kind`; None if the source code is not available."""
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    return f"{file}:{line} {kind.__name__}"


def _find_last_line(code: CodeType) -> int:
    last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return max([last, *(_find_last_line(const) for const in code.co_consts if isinstance(const, CodeType))])
