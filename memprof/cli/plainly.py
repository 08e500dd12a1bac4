"""Options that were not given, words and whole numbers, without pydantic.

Releases of typer that ask it of each option's value import it and make a validator for each: as long as all else before
a command runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LARGEST = 18
"""Digits of a number that is told without pydantic."""


class _Plainly:
    """In place of typer's `RuntimeParam`, until it takes one."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value that typer would make of a word or, of what was not given, of None."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        about = param.type_descriptor
        info, kind = about.parameter_info, about.annotation
        is_plain = type(value) is str and value.isascii() and not several and info.parser is None
        if is_plain and kind is str:
            return value
        if is_plain and kind is int and value.isdigit() and len(value) <= _LARGEST and info.min is info.max is None:
            return int(value)
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def take_plainly(parameters: Iterable[Any]) -> None:
    """Let typer ask pydantic of these parameters only where it must."""
    for one in parameters:
        if hasattr(one, "type_descriptor") and getattr(one, "_runtime_param", one) is None:
            one._runtime_param = _Plainly()
