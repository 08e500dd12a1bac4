"""Defaults of options from a file: `memprof.toml`, or the table `[tool.memprof]` of `pyproject.toml`.

    gpu = "rtx-4090"    # of every command that has --gpu

    [run]               # of one command
    steps = 5

The first such file from the current folder upwards is taken. What the command line says wins. What names code to run or
files to replace is the command line's alone: a folder of others must not do either by being entered.

`--config FILE` names a file of the same form, in YAML or TOML, which may name the model too; `--save-config FILE`
writes one of a command's options. `--preset` stands for some options: `small`, `optimized` or `long-context`. What the
command line says wins over the file, that over the preset, and that over memprof.toml; what is taken is said first.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from memprof.errors import UsageError, unknown_name
from memprof.run_spec import SETTINGS

_ON_THE_COMMAND_LINE = (
    "model", "trust-remote-code", "force", "save", "csv", "html", "to", "log", "debug", "no-color", "help", "m",
    "config", "save-config", "preset",
)  # fmt: skip
_MAY_BE_NAMED = ("model", "m")  # by a file that the command line names
_LONG = "chunked-loss,activation-checkpointing,expandable-segments"
# Options that a name stands for; a command takes those that it has.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {"model": "gpt2", "context-length": 256, "batch-size": 1},
    "optimized": {"dtype": "bfloat16", "batch-size": 1, "fix": f"{_LONG},fused-optimizer"},
    "long-context": {"context-length": 131_072, "dtype": "bfloat16", "batch-size": 1, "fix": _LONG},
}
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
# What a pyproject.toml with the table has somewhere; to parse one takes longer than the rest of the start.
_MARK = re.compile(rb"tool[\"'\s]*\.\s*[\"']?memprof|^\s*\[?\s*[\"']?tool[\"']?\s*[]=]", re.MULTILINE)
_MOST_BYTES = 1 << 20  # of a file of options
PANEL = "Settings"
# Options of every command, seen to before it runs.
OPTIONS = {
    "config": typer.Option(
        "--config", help="Options from a YAML or TOML file.", metavar="FILE", rich_help_panel=PANEL
    ),
    "save_config": typer.Option(
        "--save-config", help="Write the options in force as such a file.", metavar="FILE", rich_help_panel=PANEL
    ),
    "preset": typer.Option(
        "--preset", help="Options that a name stands for: " + ", ".join(PRESETS) + ".", metavar="NAME",
        rich_help_panel=PANEL,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings that a command took from a file, or a preset, as words of its command line."""

    path: Path | str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"From {self.path}: {' '.join(self.words)}"


taken: tuple[LoadedSettings, ...] = ()  # by the command that runs now, the weakest first
words: tuple[str, ...] = ()  # the command that runs, with all its options


def read() -> tuple[Path, Mapping[str, Any]] | None:
    """Return the nearest file with settings from the current folder upwards, and what it says; None: there is none."""
    if os.environ.get(SETTINGS) == "off":
        return None
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


def read_named(path: Path) -> Mapping[str, Any]:
    """Return what the file of `--config` says, TOML by its suffix or else YAML; UsageError if it has no table.

    Names may have underscores for dashes.
    """
    try:
        if not path.is_file():  # a device or a pipe may have no end
            raise UsageError("no such file", value=f"--config {path}", hint="give a YAML or TOML file")
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError("the file of --config is too large for options", value=path)
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError("the file of --config cannot be read", value=f"{path}: {error}") from None
    table = _parse(path, data) if path.suffix == ".toml" else _parse_yaml(path, data)
    if not isinstance(table, dict):
        hint = "write lines such as context-length: 4096, or profile: and such lines below it"
        raise UsageError("the file of --config has no options", value=path, hint=hint)
    return {
        _dashed(key): {_dashed(name): inner for name, inner in value.items()} if isinstance(value, dict) else value
        for key, value in table.items()
    }


def is_for_the_command_line(name: str) -> bool:
    """Say whether no file says it: what names code to run, or files to write."""
    return name in _ON_THE_COMMAND_LINE and name not in _MAY_BE_NAMED


def _dashed(name: object) -> str:
    return str(name).replace("_", "-")


def _parse_yaml(path: Path, data: bytes) -> Any:
    import yaml

    try:
        return yaml.safe_load(data.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise UsageError("the file is no YAML", value=f"{path}: {said}", hint="correct it") from None


def write_named(path: Path, command: str, values: Mapping[str, Any]) -> None:
    """Write a new file for `--config` with options of one command, TOML by its suffix or else YAML."""
    if path.suffix == ".toml":
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        text = "\n".join([f"[{command}]", *lines, ""])
    else:
        import yaml

        text = yaml.safe_dump({command: dict(values)}, sort_keys=False, allow_unicode=True)
    made = False
    try:
        with path.open("x", encoding="utf-8") as file:
            made = True
            file.write(text)
    except FileExistsError:
        raise UsageError("--save-config replaces no file", value=path, hint="name another, or remove it") from None
    except OSError as error:
        if made:
            path.unlink()
        raise UsageError("--save-config cannot write", value=f"{path}: {error.strerror}") from None


def defaults(
    path: Path, table: Mapping[str, Any], command: str, known: Mapping[str, Collection[str]], *, named: bool = False
) -> dict[str, Any]:
    """Return what a file says of the options of `command`; `known` are all commands' options, without dashes.

    With `named` the command line names the file, which may then name the model, and list what commas separate.
    Raises UsageError if something is no option, or not for a file.
    """
    everywhere = {name for names in known.values() for name in names}
    found: dict[str, Any] = {}
    for key, value in sorted(table.items(), key=lambda item: isinstance(item[1], dict)):  # a command's own come last
        of_command = isinstance(value, dict)
        if of_command and key not in known:
            raise unknown_name(f"command in {path}", key, known)
        for name, setting in value.items() if of_command else [(key, value)]:
            if named and isinstance(setting, list) and all(isinstance(one, str | int | float) for one in setting):
                setting = ",".join(map(str, setting))
            if is_for_the_command_line(name) or (name in _MAY_BE_NAMED and not named):
                raise UsageError(f"{name} is for the command line alone", value=path, hint="leave it out of the file")
            if name not in (known[key] if of_command else everywhere):
                raise unknown_name(f"option in {path}", name, known[key] if of_command else everywhere)
            if not isinstance(setting, str | int | float):
                # Aliases of YAML make a short file a value that has no end.
                raise UsageError(f"{name} has no value that an option has", value=f"{path}: {_SHORT.repr(setting)}")
            if name in known[command] and key in (name, command):
                found[name] = setting
    return found
