"""Defaults of options from a file: `memprof.toml`, or the table `[tool.memprof]` of `pyproject.toml`.

    gpu = "rtx-4090"    # of every command that has --gpu

    [run]               # of one command
    steps = 5

The nearest such file from the current folder upwards is read. The command line overrides the file. Options that name
code to run, files to replace or what an assistant may read are allowed only on the command line: entering someone's
folder must not run code.

`--config FILE` names a file of the same form, in YAML or TOML, which may also name the model; `--save-config FILE`
writes such a file. `--preset` is a name for several options: `small`, `optimized` or `long-context`. The command line
overrides the file, the file the preset, and the preset memprof.toml; options taken from them are printed first.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from memprof.errors import UsageError, unknown_name
from memprof.run_spec import SETTINGS_VARIABLE

_COMMAND_LINE_ONLY = (
    "model", "trust-remote-code", "force", "root", "save", "csv", "parquet", "store", "html", "image", "markdown", "to",
    "log", "debug", "no-color", "help", "help-all", "m", "config", "save-config", "preset",
)  # fmt: skip
_ALLOWED_IN_CONFIG = ("model", "m")  # allowed in a file named by --config
_LONG_CONTEXT_FIXES = "chunked-loss,activation-checkpointing,expandable-segments"
# Preset -> its options; a command takes only options that it has.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {"model": "gpt2", "context-length": 256, "batch-size": 1},
    "optimized": {"dtype": "bfloat16", "batch-size": 1, "fix": f"{_LONG_CONTEXT_FIXES},fused-optimizer"},
    "long-context": {"context-length": 131_072, "dtype": "bfloat16", "batch-size": 1, "fix": _LONG_CONTEXT_FIXES},
}
_REPR = reprlib.Repr()
_REPR.maxlevel = 2
# Matches any pyproject.toml with the table; parsing others would double the start-up time.
_TABLE_PATTERN = re.compile(rb"tool[\"'\s]*\.\s*[\"']?memprof|^\s*\[?\s*[\"']?tool[\"']?\s*[]=]", re.MULTILINE)
_MAX_FILE_BYTES = 1 << 20  # of a file of options
PANEL_NAME = "Settings"
# Options of all commands, handled before the command runs.
SETTINGS_OPTIONS = {
    "config": typer.Option(
        "--config", help="Options from a YAML or TOML file.", metavar="FILE", rich_help_panel=PANEL_NAME
    ),
    "save_config": typer.Option(
        "--save-config", help="Write the options in force as such a file.", metavar="FILE", rich_help_panel=PANEL_NAME
    ),
    "preset": typer.Option(
        "--preset", help="Options that a name stands for: " + ", ".join(PRESETS) + ".", metavar="NAME",
        rich_help_panel=PANEL_NAME,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Options from a settings file or a preset, as command-line arguments."""

    path: Path | str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"From {self.path}: {' '.join(self.arguments)}"


sources: tuple[LoadedSettings, ...] = ()  # Settings of the current command, lowest priority first.
command_line: tuple[str, ...] = ()  # The current command with all its options.


def read_settings() -> tuple[Path, Mapping[str, Any]] | None:
    """Return the nearest settings file from the current folder upwards, and its table; None: no such file."""
    if os.environ.get(SETTINGS_VARIABLE) == "off":
        return None
    try:
        start = Path.cwd()
    except OSError:  # the folder was removed
        return None
    for folder in (start, *start.parents):
        for name in ("memprof.toml", "pyproject.toml"):
            path = folder / name
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if name == "pyproject.toml" and not _TABLE_PATTERN.search(data):
                continue
            table = _parse_toml(path, data)
            if name == "pyproject.toml":
                tools = table.get("tool")
                table = tools.get("memprof") if isinstance(tools, dict) else None
            if table is None:
                continue
            if not isinstance(table, dict):
                raise UsageError("tool.memprof is no table", value=path, hint="write [tool.memprof]")
            return path, table
    return None


def _parse_toml(path: Path, data: bytes) -> Any:
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError("the file is no TOML", value=f"{path}: {error}", hint="correct it, or move it away") from None


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the table in the file of `--config`, TOML by suffix, else YAML, with dashes for underscores in names.
    Raises UsageError: the file cannot be read, or has no table."""
    try:
        if not path.is_file():  # a device or a pipe may have no end
            raise UsageError("no such file", value=f"--config {path}", hint="give a YAML or TOML file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError("the file of --config is too large for options", value=path)
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError("the file of --config cannot be read", value=f"{path}: {error}") from None
    table = _parse_toml(path, data) if path.suffix == ".toml" else _parse_yaml(path, data)
    if not isinstance(table, dict):
        hint = "write lines such as context-length: 4096, or profile: and such lines below it"
        raise UsageError("the file of --config has no options", value=path, hint=hint)
    return {
        key: _replace_underscores(path, value) if isinstance(value, dict) else value
        for key, value in _replace_underscores(path, table).items()
    }


def is_command_line_only(name: str) -> bool:
    """Return whether an option is not allowed in settings files: it names code to run, files to write or to read."""
    return name in _COMMAND_LINE_ONLY and name not in _ALLOWED_IN_CONFIG


def _replace_underscores(path: Path, table: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `table` with dashes for underscores in its names. Raises UsageError: that makes two of them equal."""
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        name = str(key).replace("_", "-")
        if name in renamed:
            raise _make_repeated_error(path, name)
        renamed[name] = value
    return renamed


def _make_repeated_error(path: Path, name: object) -> UsageError:
    return UsageError(f"{name} is in the file twice", value=path, hint="leave out one of them")


def _parse_yaml(path: Path, data: bytes) -> Any:
    import yaml

    try:
        text = data.decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        table = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise UsageError("the file is no YAML", value=f"{path}: {message}", hint="correct it") from None
    # YAML's parser takes the last value of a repeated name, without a word.
    for node in (root, *(value for _, value in root.value)) if isinstance(root, yaml.MappingNode) else ():
        names = [str(key.value) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for name, count in Counter(names).items():
            if count > 1:
                raise _make_repeated_error(path, name)
    return table


def write_config(path: Path, command: str, values: Mapping[str, Any]) -> None:
    """Write the options of a command to a new file for `--config`, TOML by suffix, else YAML."""
    if path.suffix == ".toml":
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        text = "\n".join([f"[{command}]", *lines, ""])
    else:
        import yaml

        text = yaml.safe_dump({command: dict(values)}, sort_keys=False, allow_unicode=True)
    is_created = False
    try:
        with path.open("x", encoding="utf-8") as file:
            is_created = True
            file.write(text)
    except FileExistsError:
        raise UsageError("--save-config replaces no file", value=path, hint="name another, or remove it") from None
    except OSError as error:
        if is_created:
            path.unlink()
        raise UsageError("--save-config cannot write", value=f"{path}: {error.strerror}") from None


def select_options(
    path: Path,
    table: Mapping[str, Any],
    command: str,
    valid: Mapping[str, Collection[str]],
    replaces: Mapping[str, str],
    *,
    is_config: bool = False,
) -> dict[str, Any]:
    """Return the options of `command` in a settings `table`; `valid` has the option names of every command, `replaces`
    for each option of this one a key that those have in common that exclude each other.

    `is_config`: the table is that of --config, which may name the model, and have lists for comma-separated values.
    Raises UsageError: an option is unknown, not allowed in the file `path`, or excluded by another one.
    """
    all_options = {name for names in valid.values() for name in names}
    general: dict[str, Any] = {}
    own: dict[str, Any] = {}  # of the command's table, which overrides the others
    for key, value in sorted(table.items(), key=lambda item: isinstance(item[1], dict)):  # tables of commands come last
        is_table = isinstance(value, dict)
        if is_table and key not in valid:
            if key in all_options:
                shape = "a value or a list" if is_config else "a value"
                raise UsageError(f"{key} is an option, and has names below it", value=path, hint=f"write {shape}")
            raise unknown_name(f"command in {path}", key, valid)
        for name, setting in value.items() if is_table else [(key, value)]:
            is_list = isinstance(setting, list) and len(setting) > 0
            if is_config and is_list and all(isinstance(item, str | int | float) for item in setting):
                setting = ",".join(map(str, setting))
            if is_command_line_only(name) or (name in _ALLOWED_IN_CONFIG and not is_config):
                raise UsageError(f"{name} is for the command line alone", value=path, hint="leave it out of the file")
            if not is_table and name in valid and name not in all_options:
                raise UsageError(f"{name} is a command, and has a value", value=path, hint="write its options below it")
            if name not in (valid[key] if is_table else all_options):
                raise unknown_name(f"option in {path}", name, valid[key] if is_table else all_options)
            if not isinstance(setting, str | int | float):
                # YAML aliases can make a short file an endless value.
                raise UsageError(f"{name} has no value that an option has", value=f"{path}: {_REPR.repr(setting)}")
            if name in valid[command] and key in (name, command):
                (own if is_table else general)[name] = setting
    kept = {name: value for name, value in general.items() if replaces[name] not in {replaces[one] for one in own}}
    for options in (kept, own):
        names: dict[str, str] = {}
        for name in (name for name, value in options.items() if value is not False):
            if (other := names.setdefault(replaces[name], name)) != name:
                raise UsageError(f"{other} and {name} exclude each other", value=path, hint="leave out one of them")
    return kept | own
