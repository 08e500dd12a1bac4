"""Values of options are those that typer makes of them, with and without pydantic."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from memprof.cli import main
from memprof.cli.plainly import _Plainly, take_plainly

WORDS = (
    None, "", "abc", "12", "0012", "-3", "+5", " 7", "7 ", "1_000", "1.5", "1e3", "5" * 18, "5" * 19, "\u0663", "é",
    "\udce9", "frame", "true", "/nowhere",
)  # fmt: skip


def _commands() -> dict[str, Any]:
    made = {name: main._command(name) for name in ("profile", "analyze", "verify", "cache")}
    return made | {f"recipes {name}": one for name, one in main._command("recipes").commands.items()}


def _outcome(parameter: Any, context: Any, value: Any) -> tuple[str, object]:
    try:
        return "value", parameter.process_value(context, value)
    except (typer.BadParameter.__bases__[0], typer.Exit) as error:
        return type(error).__name__, getattr(error, "message", "")


@pytest.mark.parametrize("name", _commands())
def test_values_are_those_of_typer(name):
    plain, ours = _commands()[name], _commands()[name]
    context = typer.Context(plain)
    if not hasattr(plain.params[0], "get_runtime_param"):
        pytest.skip("this release of typer asks pydantic nothing")
    took = 0
    for one, other in zip(plain.get_params(context), ours.get_params(context), strict=True):
        one._runtime_param = None  # of --help, which both have
        several = one.multiple or one.nargs == -1
        for word in WORDS:
            value = (word,) if several and word is not None else word
            expected = _outcome(one, context, value)
            other._runtime_param = None
            take_plainly([other])
            assert _outcome(other, context, value) == expected, (one.name, value)
            took += isinstance(other._runtime_param, _Plainly)
    assert took >= len(plain.params)
