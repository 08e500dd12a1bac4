"""Defaults of options from a file: `memprof.toml`, or the table `[tool.memprof]` of `pyproject.toml`.

    gpu = "rtx-4090"    # of every command that has --gpu

    [run]               # of one command
    steps = 5

The first such file from the current folder upwards is taken. What the command line says wins. What names code to run or
files to replace is the command line's alone: a folder of others must not do either by being entered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, unknown_name

_ON_THE_COMMAND_LINE = (
    "model", "trust-remote-code", "force", "save", "csv", "to", "log", "debug", "help", "m",
)  # fmt: skip
_MARK = re.compile(rb"tool[\"'\s]*\.\s*[\"']?memprof|^\s*\[?\s*[\"']?tool[\"']?\s*[]=]", re.MULTILINE)
"""What a pyproject.toml with the table has somewhere; to parse one takes longer than the rest of the start."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a command took from a file, as words of its command line."""

    path: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"From {self.path}: {' '.join(self.words)}"


taken: Taken | None = None
"""By the command that runs now."""


def read() -> tuple[Path, Mapping[str, Any]] | None:
    """The nearest file with settings from the current folder upwards, and what it says; None if there is none.

    Raises:
        UsageError: it is no TOML, or has no table.
    """
    try:
        start = Path.cwd()
    except OSError:  # it was removed
        return None
    for folder in (start, *start.parents):
        for name in ("memprof.toml", "pyproject.toml"):
            path = folder / name
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if name == "pyproject.toml" and not _MARK.search(data):
                continue
            table = _parse(path, data)
            if name == "pyproject.toml":
                tools = table.get("tool")
                table = tools.get("memprof") if isinstance(tools, dict) else None
            if table is None:
                continue
            if not isinstance(table, dict):
                raise UsageError("tool.memprof is no table", value=path, hint="write [tool.memprof]")
            return path, table
    return None


def _parse(path: Path, data: bytes) -> Any:
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError("the file is no TOML", value=f"{path}: {error}", hint="correct it, or move it away") from None


def defaults(
    path: Path, table: Mapping[str, Any], command: str, known: Mapping[str, Collection[str]]
) -> dict[str, Any]:
    """What a file says of the options of `command`; `known` are all commands' options, without dashes.

    Raises:
        UsageError: something is no option, or not for a file.
    """
    everywhere = {name for names in known.values() for name in names}
    found: dict[str, Any] = {}
    for key, value in sorted(table.items(), key=lambda item: isinstance(item[1], dict)):  # a command's own come last
        of_command = isinstance(value, dict)
        if of_command and key not in known:
            raise unknown_name(f"command in {path}", key, known)
        for name, setting in value.items() if of_command else [(key, value)]:
            if name in _ON_THE_COMMAND_LINE:
                raise UsageError(f"{name} is for the command line alone", value=path, hint="leave it out of the file")
            if name not in (known[key] if of_command else everywhere):
                raise unknown_name(f"option in {path}", name, known[key] if of_command else everywhere)
            if not isinstance(setting, str | int | float):
                raise UsageError(f"{name} has no value that an option has", value=f"{path}: {setting}")
            if name in known[command] and key in (name, command):
                found[name] = setting
    return found
