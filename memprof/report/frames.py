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
    """A table of a document: rows of one dataclass, each after the values of `key_columns`."""

    rows: Iterable[Any]
    row_type: type | None = None  # None: only the columns `before`.
    key_columns: dict[str, type] = field(default_factory=dict)

    def to_frame(self) -> DataFrame:
        """Return the rows as a data frame; fields of nested rows become columns named with a dot."""
        import pandas

        known = [one if self.key_columns else (one,) for one in self.rows]
        columns = {name: ([one[at] for one in known], hint) for at, (name, hint) in enumerate(self.key_columns.items())}
        if self.row_type is not None:
            plain = [to_plain(one[-1]) for one in known]
            for path, hint in _list_fields(self.row_type):
                inside = plain
                for name in path:
                    inside = [None if one is None else one[name] for one in inside]
                columns[".".join(path)] = (inside, hint)
        return pandas.DataFrame(
            {
                name: pandas.Series(map(_escape_surrogates, values), dtype=_choose_dtype(hint))
                for name, (values, hint) in columns.items()
            }
        )


def _escape_surrogates(value: Any) -> Any:
    """Return a value; in a string, unpaired surrogates, which pandas rejects, become escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _list_fields(
    row_type: type, path: tuple[str, ...] = (), *, optional: bool = False
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and type of each field of a dataclass and of nested dataclasses; lists of rows are separate tables."""
    for _, name, hint in json_fields(row_type):
        hint = hint | None if optional else hint
        place = (*path, name)
        (known, *others), is_optional = _split_union(hint)
        if dataclasses.is_dataclass(known) and isinstance(known, type) and not others:
            yield from _list_fields(known, place, optional=is_optional)
        elif not any(dataclasses.is_dataclass(one) for one in get_args(known)):
            yield place, hint


def _split_union(hint: Any) -> tuple[list[Any], bool]:
    """Return the types of a union without None, and whether None is among them."""
    inside = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [one for one in inside if one is not NoneType], NoneType in inside


def _choose_dtype(hint: Any) -> str:
    (known, *others), is_optional = _split_union(hint)
    if others or not isinstance(known, type):
        return "object"
    return "string" if issubclass(known, str) else _DTYPES.get(known, ("object", "object"))[is_optional]
