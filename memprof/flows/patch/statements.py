"""Edits of one statement: where a checkpoint is loaded to, what is kept of an error, when gradients are freed."""

from __future__ import annotations

import ast

from memprof.flows.patch.kept_values import find_values
from memprof.flows.patch.source import Change, NoPatchError, Source


def load_on_host(source: Source, line: int) -> list[Change]:
    """Return the change of the `torch.load` in `line`, so that it loads to host memory. Raises NoPatchError: there is
    none, or several."""
    calls = [
        node
        for statement in source.list_statements(line)[:1]
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    if len(calls) != 1:
        raise NoPatchError(f"line {line} has no single call of torch.load")
    (call,) = calls
    given = [keyword.value for keyword in call.keywords if keyword.arg == "map_location"] or call.args[1:2]
    if given:
        return [Change(source.begin(given[0]), source.end(given[0]), '"cpu"')]
    closing = source.end(call) - 1
    comma = "" if source.text[:closing].rstrip().endswith(",") else ", "
    return [Change(closing, closing, f'{comma}map_location="cpu"')]


def keep_error_text(source: Source, line: int, name: str) -> list[Change]:
    """Return the changes of the statement that keeps a caught error in `name`, so that it keeps the error's text.

    Raises NoPatchError: no such statement, or the error is raised again later.
    """
    variable = name.partition("[")[0].rpartition(".")[2]
    if any(isinstance(node, ast.Raise) and node.exc and ast.unparse(node.exc) == variable for node in source.walk()):
        raise NoPatchError(f"`{name}` is raised again")
    found = []
    for handler in (node for node in source.walk() if isinstance(node, ast.ExceptHandler) and node.name):
        for statement in (node for node in ast.walk(handler) if isinstance(node, ast.stmt)):
            for value in find_values(statement, variable):
                parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
                found += [one for one in parts if isinstance(one, ast.Name) and one.id == handler.name]
    found = [one for one in found if one.lineno == line] or found
    if not found:
        raise NoPatchError(f"no `except` block shows how `{name}` gets the error")
    return [Change(source.begin(one), source.end(one), f"str({one.id})") for one in found]


def free_gradients(source: Source) -> list[Change]:
    """Return the changes that free gradients right after the optimizer's step, in each block that has both calls.

    Raises NoPatchError: no block has, or one reads gradients after the step.
    """
    changes = []
    for block in source.list_blocks():
        steps = _find_calls(block, "step")
        for reset in _find_calls(block, "zero_grad"):
            model = ast.unparse(reset.func.value)  # type: ignore[attr-defined]
            own = [one for one in steps if model in map(ast.unparse, (one.func.value, *one.args))]  # type: ignore[attr-defined]
            for step in (own or steps)[-1:]:
                if source.begin(reset) > source.begin(step) and not reset.keywords:
                    continue  # it frees them already
                # Of several optimizers of one model the last has to have stepped.
                readers = ("grad",) if own else ("grad", "step")
                changes.append(_reset_after(source, source.find_statement(step), model, readers))
    if not changes:
        raise NoPatchError("no block calls zero_grad() and then step()")
    return list(dict.fromkeys(changes))


def _reset_after(source: Source, step: ast.stmt, model: str, readers: tuple[str, ...]) -> Change:
    """Return the change that frees the gradients of `model`, or of an optimizer, after the statement `step`.

    Raises NoPatchError: the attributes or methods `readers`, which read gradients, follow in the block.
    """
    following = (one for one in source.find_block(step) if source.begin(one) > source.begin(step))
    attributes = (node for one in following for node in ast.walk(one) if isinstance(node, ast.Attribute))
    if any(node.attr in readers for node in attributes):
        raise NoPatchError(f"gradients may be read after line {step.lineno}")
    return source.insert_after(step, f"{model}.zero_grad(set_to_none=True)")


def _find_calls(block: list[ast.stmt], method: str) -> list[ast.Call]:
    """Return the calls of a method of this name that are statements of `block`."""
    calls = [one.value for one in block if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == method]
