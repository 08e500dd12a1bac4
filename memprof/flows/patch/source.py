"""The text of a Python file with its syntax tree, and changes of it at exact positions: the rest stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NO_FOLLOWING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class NoPatchError(Exception):
    """A place in a file that cannot be changed safely; the text says why."""


class Change(NamedTuple):
    """New text for the characters from `begin` to before `end`; where they are equal, it is inserted."""

    begin: int
    end: int
    text: str


class Source:
    """A Python file: its text, its syntax tree, and where each node stands.

    Raises NoPatchError: the text is not of this Python.
    """

    def __init__(self, text: str, *, is_script: bool = True) -> None:
        self.text, self.is_script = text, is_script
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NoPatchError("the file is not valid Python") from error
        if "\r" in text.replace("\r\n", "") or "\f" in text:
            raise NoPatchError("the file has line ends that are not those of this system")
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._lines = text.split("\n")
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line) + 1)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def change(self, changes: list[Change]) -> str:
        """Return the text with `changes`, which do not overlap. Raises NoPatchError: the result is no valid Python."""
        text = self.text
        for change in sorted(changes, reverse=True):
            text = text[: change.begin] + change.text + text[change.end :]
        return Source(text).text

    def begin(self, node: ast.AST) -> int:
        """Return the position of the first character of `node`, a statement or expression."""
        return self._find_position(node, node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return the position after the last character of `node`, a statement or expression."""
        return self._find_position(node, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def read(self, node: ast.AST) -> str:
        """Return the text of `node`, a statement or expression."""
        return self.text[self.begin(node) : self.end(node)]

    def _find_position(self, node: ast.AST, line: int, column: int) -> int:
        """Return the position of a line and of its UTF-8 bytes before it, as the syntax tree counts them for `node`.

        Raises NoPatchError: `node` is part of an f-string, of which Python before 3.12 does not know the place.
        """
        text = next((one for one in self.iterate_parents(node) if isinstance(one, ast.JoinedStr)), None)
        if text is not None:
            raise NoPatchError(f"it is in the f-string of line {text.lineno}")
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def walk(self) -> Iterator[ast.AST]:
        """Yield all nodes of the file."""
        return ast.walk(self.tree)

    def check_name(self, module: str) -> None:
        """Raise NoPatchError unless the file imports `module` by its own name."""
        imports = (alias for node in self.walk() if isinstance(node, ast.Import) for alias in node.names)
        if not any(alias.name.partition(".")[0] == module and alias.asname is None for alias in imports):
            raise NoPatchError(f"the file does not import {module} by this name")

    def iterate_parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what `node` is part of, the innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def find_statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that `node` is, or is part of."""
        return next(one for one in (node, *self.iterate_parents(node)) if isinstance(one, ast.stmt))

    def find_scope(self, node: ast.AST) -> ast.AST:
        """Return the function whose variables `node` has, or the file."""
        return next((one for one in self.iterate_parents(node) if isinstance(one, _FUNCTIONS)), self.tree)

    def list_statements(self, line: int) -> list[ast.stmt]:
        """Return the statements of `line` (from 1), the innermost first; a block counts with its first lines alone."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= _find_last_head_line(node)
        ]
        return sorted(found, key=lambda node: -node.lineno)

    def list_blocks(self) -> list[list[ast.stmt]]:
        """Return the blocks of the file: lists of statements."""
        fields = [value for node in self.walk() for _, value in ast.iter_fields(node)]
        return [value for value in fields if isinstance(value, list) and value and isinstance(value[0], ast.stmt)]

    def find_block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that `statement` is one of."""
        return next(block for block in self.list_blocks() if statement in block)

    def insert_after(self, statement: ast.stmt, text: str) -> Change:
        """Return the change that adds a line with `text` after `statement`, in its block.

        Raises NoPatchError: the block is not written as lines, or what follows `statement` in its block is never run.
        """
        if isinstance(statement, _NO_FOLLOWING):
            raise NoPatchError(f"line {statement.lineno} leaves the block")
        end = self._find_end_of_line(statement)
        return Change(end, end, f"{self._newline}{self.read_indent(statement)}{text}")

    def _find_end_of_line(self, statement: ast.stmt) -> int:
        """Return the position of the end of the line with the end of `statement`. Raises NoPatchError: another one
        follows in that line."""
        end, line_end = self.end(statement), self._begins[statement.end_lineno or statement.lineno] - 1
        rest = self.text[end:line_end].strip()
        if rest and not rest.startswith("#"):
            raise NoPatchError(f"line {statement.end_lineno} has several statements")
        return line_end - self.text[end:line_end].endswith("\r")

    def indent(self, statement: ast.stmt, header: str) -> list[Change]:
        """Return the changes that put `statement` into a block that begins with the line `header`. Raises NoPatchError:
        `statement` is not written as lines, or has a text of several lines, which would change."""
        texts = (node for node in ast.walk(statement) if isinstance(node, (ast.Constant, ast.JoinedStr)))
        if any(node.lineno != node.end_lineno for node in texts):
            raise NoPatchError(f"line {statement.lineno} has a text of several lines")
        self._find_end_of_line(statement)
        step = "\t" if "\t" in self.read_indent(statement) else "    "
        lines = range(statement.lineno - 1, statement.end_lineno or statement.lineno)
        begins = [self._begins[line] for line in lines if self._lines[line].strip()]
        first = Change(begins[0], begins[0], self.insert_before(statement, header).text + step)
        return [first, *(Change(begin, begin, step) for begin in begins[1:])]

    def insert_before(self, statement: ast.stmt, text: str) -> Change:
        """Return the change that adds a line with `text` before `statement`, in its block. Raises NoPatchError: the
        block is not written as lines."""
        begin = self.begin(statement) - len(self.read_indent(statement))
        return Change(begin, begin, f"{self.read_indent(statement)}{text}{self._newline}")

    def read_indent(self, statement: ast.stmt) -> str:
        """Return the blanks before `statement`. Raises NoPatchError: it does not begin its line."""
        begin = self.begin(statement)
        indent = self.text[self._begins[statement.lineno - 1] : begin]
        if indent.strip() or self.text.startswith("elif", begin):
            raise NoPatchError(f"line {statement.lineno} has several statements")
        return indent


def parse_source(source: str) -> tuple[str, int]:
    """Return the file and the line of a `file:line function`."""
    file, _, line = source.rpartition(" ")[0].rpartition(":")
    return file, int(line)


def _find_last_head_line(statement: ast.stmt) -> int:
    """Return the last line of a statement, of a block the one before its first statement."""
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    return max(statement.lineno, body[0].lineno - 1) if isinstance(body, list) and body else last
