"""Conversion of a document's tables to pandas data frames.

Columns have the names of the JSON, sizes are bytes. Fields of a nested row become columns named with a dot
(`cost.step_seconds`). Unknown values are missing (`NA`), integer columns stay integer, and a table without rows has all
columns.
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

# Type of a field -> dtype of its column, and dtype of a column with missing values.
_DTYPES = {int: ("int64", "Int64"), bool: ("bool", "boolean"), float: ("float64", "float64")}


@dataclass(frozen=True)
class RowTable:
    """A table of a document: rows of one dataclass, each preceded by the values of `key_columns`, if there are any."""

    rows: Iterable[Any]
    row_type: type | None = None  # None: only the columns `key_columns`.
    key_columns: dict[str, type] = field(default_factory=dict)

    def to_frame(self) -> DataFrame:
        """Return the rows as a data frame; fields of nested rows become columns named with a dot."""
        import pandas

        rows = [row if self.key_columns else (row,) for row in self.rows]
        columns = {name: ([row[i] for row in rows], hint) for i, (name, hint) in enumerate(self.key_columns.items())}
        if self.row_type is not None:
            json_rows = [to_plain(row[-1]) for row in rows]
            for path, hint in _list_fields(self.row_type):
                cells = json_rows
                for name in path:
                    cells = [None if row is None else row[name] for row in cells]
                columns[".".join(path)] = (cells, hint)
        return pandas.DataFrame(
            {
                name: pandas.Series(map(_escape_surrogates, cells), dtype=_choose_dtype(hint))
                for name, (cells, hint) in columns.items()
            }
        )


def _escape_surrogates(value: Any) -> Any:
    """Return `value`; in a string, replace unpaired surrogates, which pandas rejects, by escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _list_fields(
    row_type: type, path: tuple[str, ...] = (), *, optional: bool = False
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and type of each field of a dataclass and its nested dataclasses, except lists of dataclasses."""
    for _, name, field_type in json_fields(row_type):
        field_type = field_type | None if optional else field_type
        field_path = (*path, name)
        (first_type, *other_types), is_optional = _split_union(field_type)
        if dataclasses.is_dataclass(first_type) and isinstance(first_type, type) and not other_types:
            yield from _list_fields(first_type, field_path, optional=is_optional)
        elif not any(dataclasses.is_dataclass(argument) for argument in get_args(first_type)):
            yield field_path, field_type


def _split_union(union: Any) -> tuple[list[Any], bool]:
    """Return the types of `union` other than None, and whether None is one of its types."""
    members = get_args(union) if isinstance(union, UnionType) else (union,)
    return [member for member in members if member is not NoneType], NoneType in members


def _choose_dtype(field_type: Any) -> str:
    (first_type, *other_types), is_optional = _split_union(field_type)
    if other_types or not isinstance(first_type, type):
        return "object"
    return "string" if issubclass(first_type, str) else _DTYPES.get(first_type, ("object", "object"))[is_optional]
