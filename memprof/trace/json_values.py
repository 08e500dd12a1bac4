"""Conversion of dataclasses to plain JSON values and back, for the facts of a trace and for reports.

A field has the same name in JSON unless `json_name` sets another. JSON does not distinguish tuples from lists, nor
members of an enum from their values: when read, the field's type decides. A NamedTuple is a list.

Why no library does it: msgspec renames and orders fields only of its own structs, and cattrs needs a hook for each of
the rules here (names, order, rows, truncated strings, 64-bit integers, `{}` for None), as long as this file. Importing
either takes about seven times as long as importing this module, a third of a whole `memprof estimate`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Iterable
from typing import Any, Self, TypeVar

T = TypeVar("T")
_INTEGER_LIMIT = 1 << 63  # limit of integers: more than any GPU's bytes, and convertible to a float
_MAX_TEXT_LENGTH = 10_000  # characters of a name, a command or a message


def json_name(name: str | None, *, last: bool = False) -> dict[str, Any]:
    """Return metadata of a dataclass field that is called `name` in JSON. None: the field is not in JSON, and gets its
    default when it is read. `last`: the field is written after all others."""
    return {"json": name, "last": last}


def truncate(text: str) -> str:
    """Return `text`, truncated to 10,000 characters: a name of megabytes in a file takes minutes to display."""
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}..."


class JsonValue:
    """Base class of dataclasses that are written to JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return this value as plain JSON values."""
        return _dump_fields(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the instance from the result of `to_json`. Unknown names are ignored; missing ones get defaults.

        Raises:
            ValueError: a value is missing, or not of its field's type.
        """
        return _build_instance(cls, values)


def to_plain(value: Any) -> Any:
    """Return `value` as plain JSON values: dataclasses, containers and enums are converted."""
    if isinstance(value, JsonValue):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return _dump_fields(value)
    if isinstance(value, dict | types.MappingProxyType):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def _dump_fields(instance: Any) -> dict[str, Any]:
    cls: Any = type(instance)
    return {name: to_plain(getattr(instance, field.name)) for field, name, _ in json_fields(cls)}


def from_plain(hint: Any, value: Any) -> Any:
    """Return the value of type `hint` that `to_plain` converted to `value`. Raises ValueError: `value` does not fit."""
    origin, type_args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        (inner_type,) = (arg for arg in type_args if arg is not types.NoneType)
        is_none = value is None or (value == {} and dataclasses.is_dataclass(inner_type))
        return None if is_none else from_plain(inner_type, value)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{value!r} is not a list")
        if origin is tuple and type_args[-1] is not Ellipsis:
            return tuple(from_plain(arg, item) for arg, item in zip(type_args, value, strict=True))
        return origin(from_plain(type_args[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        return {key: from_plain(type_args[1], item) for key, item in value.items()}
    if issubclass(hint, JsonValue):
        return hint.from_json(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build_instance(hint, value)
    if issubclass(hint, tuple):  # a NamedTuple is a row
        return hint(*map(from_plain, _get_row_types(hint)[: len(value)], value))
    if issubclass(hint, enum.Enum):
        return hint(value)
    if not isinstance(value, (int, float) if hint is float else hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{value!r} is not of type {hint.__name__}")
    if type(value) is int and not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise ValueError("a number is out of range")
    return truncate(value) if type(value) is str else value


def fields_from_plain(cls: type, values: Any) -> dict[str, Any]:
    """Return the fields of the dataclass `cls` that are in `values`, by their Python names. Raises ValueError: a value
    is not of its field's type."""
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} is no {cls.__name__}")
    return {
        field.name: from_plain(hint, values[name])
        for field, name, hint in json_fields(cls)
        if field.init and name in values
    }


def _build_instance(cls: type[T], values: Any) -> T:
    fields = fields_from_plain(cls, values)
    try:
        return cls(**fields)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(str(error)) from None


def rows_from_plain(cls: Any, rows: Any) -> list[Any]:
    """Return `rows` as instances of the NamedTuple `cls`, checked by column. Lists become tuples. Raises ValueError: a
    value is not of its column's type, an integer exceeds 64 bits, or a row's length is wrong."""
    if not isinstance(rows, list) or any(type(row) is not list for row in rows):
        raise ValueError(f"the table of {cls.__name__} is none")
    columns: list[Any] = []
    for hint, column in zip(_get_row_types(cls), zip(*rows, strict=True), strict=False):
        is_list = typing.get_origin(hint) is tuple
        _check_column(typing.get_args(hint)[0] if is_list else hint, itertools.chain(*column) if is_list else column)
        columns.append(map(tuple, column) if is_list else map(truncate, column) if hint is str else column)
    if columns and len(rows[0]) > len(columns):
        raise ValueError(f"a row of {cls.__name__} has {len(rows[0])} values")
    return list(itertools.starmap(cls, zip(*columns, strict=True)))


def _check_column(hint: Any, values: Iterable[Any]) -> None:
    value_types: set[type] = set()
    minimum = maximum = 0
    for value in values:
        value_types.add(type(value))
        if type(value) is int and not minimum <= value <= maximum:
            minimum, maximum = min(minimum, value), max(maximum, value)
    if not value_types <= ({int, float} if hint is float else {hint}):
        raise ValueError(f"a value is not of type {hint.__name__}")
    if minimum < -1 or maximum >= _INTEGER_LIMIT:
        raise ValueError("a number is out of range")


@functools.cache
def _get_row_types(cls: Any) -> list[Any]:
    hints = typing.get_type_hints(cls)
    return [hints[name] for name in cls._fields]


@functools.cache
def json_fields(cls: Any) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    """Return (field, name in JSON, type) for the fields of the dataclass `cls` that are in JSON, in JSON's order."""
    hints = typing.get_type_hints(cls)
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.metadata.get("last", False))
    json_names = [(field, field.metadata.get("json", field.name)) for field in fields]
    return [(field, name, hints[field.name]) for field, name in json_names if name is not None]
