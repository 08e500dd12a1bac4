"""Edits of a block: evaluation under torch.no_grad(), and a retry that leaves its `except` block first."""

from __future__ import annotations

import ast

from memprof.flows.patch.source import Change, NoPatchError, Source

_FLAG = "ran_out_of_memory"
_TRAINING = ("backward", "step", "grad")  # methods and functions that need a graph
_READERS_OF_ERRORS = ("exc_info", "print_exc", "format_exc", "exception")  # functions that read the error being handled


def call_without_gradients(source: Source, line: int) -> list[Change]:
    """Return the changes with which the call in `line` makes no graph: a decorator of its function, or a `with` block
    around the outermost loop or statement that trains nothing.

    Raises NoPatchError: the file does not import torch by its name, or the block cannot be indented.
    """
    source.check_name("torch")
    statements = source.list_statements(line)
    if not statements:
        raise NoPatchError(f"line {line} has no statement")
    outermost = statements[0]
    for node in source.iterate_parents(statements[0]):
        if _trains(node) or isinstance(node, ast.Module):
            break
        if isinstance(node, ast.FunctionDef):
            return [source.insert_before(node, "@torch.no_grad()")]
        if isinstance(node, (ast.AsyncFunctionDef, ast.ClassDef)):
            break
        outermost = node if isinstance(node, ast.stmt) else outermost
    if _trains(outermost):
        raise NoPatchError(f"line {line} trains as well")
    return source.indent(outermost, "with torch.no_grad():")


def _trains(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _TRAINING
        for one in ast.walk(node)
    )


def retry_after_handler(source: Source, line: int) -> list[Change]:
    """Return the changes with which the `except` block that `line` is in sets a flag, and what it does follows it.

    Raises NoPatchError: the `try` has more than this block at its end, or the retry needs the error.
    """
    handlers = (node for one in source.list_statements(line)[:1] for node in (one, *source.iterate_parents(one)))
    handler = next((node for node in handlers if isinstance(node, ast.ExceptHandler)), None)
    attempt = None if handler is None else next(source.iterate_parents(handler))
    if handler is None or not isinstance(attempt, ast.Try):
        raise NoPatchError(f"line {line} is in no `except` block")
    if attempt.orelse or attempt.finalbody or attempt.handlers[-1] is not handler:
        raise NoPatchError("another block of the same `try` follows")
    if _FLAG in source.text:
        raise NoPatchError(f"`{_FLAG}` is used already")
    first = 1 + max((index for index, one in enumerate(handler.body) if _reads_error(one, handler.name)), default=-1)
    retry = handler.body[first:]
    if not retry or line < retry[0].lineno:
        raise NoPatchError("the retry reads the error")
    flag = source.insert_before(retry[0], f"{_FLAG} = True")
    return [
        source.insert_before(attempt, f"{_FLAG} = False"),
        flag._replace(text=flag.text + source.insert_before(attempt, f"if {_FLAG}:").text),
    ]


def _reads_error(statement: ast.stmt, name: str | None) -> bool:
    """Return whether `statement` reads the error that is being handled, or raises it again."""
    return any(
        (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.Raise) and node.exc is None)
        or (isinstance(node, ast.Attribute) and node.attr in _READERS_OF_ERRORS)
        for node in ast.walk(statement)
    )
