"""The tables of a document as pandas' data frames. Columns have the names of the JSON, sizes are bytes.

A row within a row gives columns named with a dot (`cost.step_seconds`). What is not known is missing (`NA`), and whole
numbers stay whole beside it. A table without rows has its columns all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args

from memprof.trace.json_values import json_fields, to_plain

if TYPE_CHECKING:
    from pandas import DataFrame

# Type of a field -> that of its column, and that of one which may lack values.
_DTYPES = {int: ("int64", "Int64"), bool: ("bool", "boolean"), float: ("float64", "float64")}


@dataclass(frozen=True)
class RowTable:
    """A table of a document: rows of one dataclass, each behind the values of the columns `before` it."""

    rows: Iterable[Any]
    row: type | None = None  # None: the columns `before` are all that there are.
    before: dict[str, type] = field(default_factory=dict)

    def to_frame(self) -> DataFrame:
        """Return the rows as a data frame; what they hold of other rows gives columns named with a dot."""
        import pandas

        known = [one if self.before else (one,) for one in self.rows]
        columns = {name: ([one[at] for one in known], kind) for at, (name, kind) in enumerate(self.before.items())}
        if self.row is not None:
            plain = [to_plain(one[-1]) for one in known]
            for path, kind in _fields(self.row):
                inside = plain
                for name in path:
                    inside = [None if one is None else one[name] for one in inside]
                columns[".".join(path)] = (inside, kind)
        return pandas.DataFrame(
            {name: pandas.Series(map(_text, values), dtype=_dtype(kind)) for name, (values, kind) in columns.items()}
        )


def _text(value: Any) -> Any:
    """Return a value; halves of characters, which pandas refuses in a text, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _fields(row: type, path: tuple[str, ...] = (), *, optional: bool = False) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield where the fields of a row and of rows within it are, and their types; rows in lists are other tables."""
    for _, name, hint in json_fields(row):
        kind = hint | None if optional else hint
        place = (*path, name)
        (known, *others), lacks = _kinds(kind)
        if dataclasses.is_dataclass(known) and isinstance(known, type) and not others:
            yield from _fields(known, place, optional=lacks)
        elif not any(dataclasses.is_dataclass(one) for one in get_args(known)):
            yield place, kind


def _kinds(kind: Any) -> tuple[list[Any], bool]:
    """Return the types in a union, but for None; and whether None is in it."""
    inside = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return [one for one in inside if one is not NoneType], NoneType in inside


def _dtype(kind: Any) -> str:
    (known, *others), lacks = _kinds(kind)
    if others or not isinstance(known, type):
        return "object"
    return "string" if issubclass(known, str) else _DTYPES.get(known, ("object", "object"))[lacks]
