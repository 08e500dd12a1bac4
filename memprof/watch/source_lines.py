"""Effect of a program's line, read from the source code: fill a container, add to a sum, only display a number."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
from types import CodeType

_FILLING_METHODS = "append|appendleft|extend|insert|add|update|setdefault|put"

# Functions and methods that display numbers: of loggers, tensorboard, wandb, progress bars.
_DISPLAY_FUNCTIONS = {
    *("print", "log", "debug", "info", "warning", "warn", "error", "critical", "write"),
    *("add_scalar", "add_scalars", "log_metrics"),
    *("set_postfix", "set_postfix_str", "set_description", "set_description_str"),
}


def is_display_statement(source: str) -> bool:
    """Return whether `source` (`file:line function`) is in a statement that only displays values.

    A value read in such a statement decides nothing.
    """
    file, _, number = source.rpartition(" ")[0].rpartition(":")
    linecache.checkcache(file)
    return any(first <= int(number) <= last for first, last in _find_display_lines("".join(linecache.getlines(file))))


@functools.lru_cache(maxsize=16)
def _find_display_lines(text: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _DISPLAY_FUNCTIONS:
                found.append((node.lineno, node.end_lineno or node.lineno))
    return tuple(found)


def find_fill_line(code: CodeType, variable: str, *, attribute: bool, keys: str = "") -> str | None:
    """Return the `file:line function` where `code` puts something into `variable`; None if there is no such line.

    `code` is of a function or a whole module. `attribute` means an attribute of an object (`self.losses`). The line
    must include `keys`, the keys of the inner container, such as `['train']['loss']`.
    """
    name = (r"\." if attribute else r"(?<![\w.])") + re.escape(variable)
    name += re.escape(keys).replace("'", "[\"']")
    name_pattern = rf"{name}(?!\w)"
    patterns = (
        rf"{name}(?:\[[^\]]*\])*\.(?:{_FILLING_METHODS})\(",
        rf"{name}(?:\[[^\]]*\])+\s*[+|]?=(?!=)",
        rf"{name}\s*(?:\+|\|)=",
        rf"{name}\s*(?::[^=]+)?=(?!=).*{name_pattern}",
    )
    lines = linecache.getlines(code.co_filename)
    first, last = code.co_firstlineno, _find_last_line(code)
    for pattern in patterns:
        for number in range(first, min(last, len(lines)) + 1):
            if re.search(pattern, lines[number - 1].partition("#")[0]):
                return f"{code.co_filename}:{number} {code.co_name}"
    return None


def format_code_line(code: CodeType) -> str:
    """Return `file:line function` of the first line of a function."""
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"


def find_class_line(kind: type) -> str | None:
    """Return `file:line class` of the first line of a class; None if the source code is not available."""
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    return f"{file}:{line} {kind.__name__}"


def _find_last_line(code: CodeType) -> int:
    own = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return max([own, *(_find_last_line(part) for part in code.co_consts if isinstance(part, CodeType))])
