"""The tools of `memprof mcp`: which command each one runs, what it takes, and the schema of its result.

What an input means is read from the options of the command.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from memprof.cli.help import DOCS_FOLDERS
from memprof.errors import UsageError, unknown_name
from memprof.spec import Option, get_options
from memprof.units import parse_gib

_MODEL = ("model", "model-size", "gpu", "gpu-vram", "gpus", "context-length")
# Inputs that are no options: of a file or a text, for what a command reads, and of a script.
_FILE = {"type": "string", "description": "Path of a file in a folder that this server may read."}
_TEXT = {"type": "string", "description": "The error message or log itself, instead of `file`."}
_ARGUMENTS = {"type": "array", "items": {"type": "string"}, "description": "The script's own arguments."}


@dataclass(frozen=True)
class Tool:
    """A tool: a command of memprof with a choice of its options.

    Args:
        name: the name that an assistant sees.
        command: the command.
        schema: the file in docs/schema that describes its JSON.
        options: the options that may be given, without dashes.
        required: inputs that must be given.
        fixed: arguments that are always given.
        inputs: inputs besides the options.
        summary: what it does, if the help of its command does not say it.
    """

    name: str
    command: str
    schema: str
    options: tuple[str, ...]
    required: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    inputs: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    summary: str = ""

    @property
    def description(self) -> str:
        """Return what the tool does, as `--help` of its command says."""
        if self.summary:
            return self.summary
        module = importlib.import_module(f"memprof.cli.{self.command}")
        return " ".join((inspect.getdoc(getattr(module, self.command)) or "").split())

    def build_input_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the inputs."""
        options = _find_options(self.command)
        named = {_to_input(name): _describe(*options[name]) for name in self.options}
        properties = {**self.inputs, **named}
        return {
            "type": "object", "properties": properties, "required": list(self.required), "additionalProperties": False,
        }  # fmt: skip

    def build_output_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of the result, without its texts; None: this installation has no docs/schema."""
        for folder in DOCS_FOLDERS:
            file = folder / "schema" / f"{self.schema}.json"
            if file.is_file():
                return {"type": "object", **_drop_texts(json.loads(file.read_text(encoding="utf-8")))}
        return None

    def build_arguments(self, values: Mapping[str, Any], roots: tuple[Path, ...]) -> list[str]:
        """Return the command line that answers a call with `values`, without the program's name.

        Raises:
            UsageError: an input is unknown or missing, or names a file outside of `roots`.
        """
        known = {*self.inputs, *map(_to_input, self.options)}
        for name in values:
            if name not in known:
                raise unknown_name("input", name, known)
        for name in self.required:
            if name not in values:
                raise UsageError("an input is missing", value=name, hint=f"{self.name} needs it")
        words = [self.command, "--json", *self.fixed]
        for option in self.options:
            value = values.get(_to_input(option))
            if option == "model" and isinstance(value, str):
                for name in {value, value.rpartition(":")[0] or value}:  # a file, or file.py:factory
                    _check_readable(name, roots, must_exist=False)
            if value is True:
                words.append(f"--{option}")
            elif value not in (None, False):
                words.append(f"--{option}={value}")
        file = values.get("file", values.get("script"))
        if file is not None:
            words.append(_check_readable(str(file), roots))
        return [*words, *map(str, values.get("arguments", ()))]


def _to_input(option: str) -> str:
    return option.replace("-", "_")


def _find_options(command: str) -> dict[str, tuple[Option, Any]]:
    """Return each option of a command, by its name without dashes, with its type."""
    module = importlib.import_module(f"memprof.cli.{command}")
    options = {}
    for kind in get_type_hints(getattr(module, command)).values():
        if dataclasses.is_dataclass(kind):
            types = get_type_hints(kind)
            for name, option in get_options(kind).items():  # type: ignore[arg-type]
                options[str(option.flag).removeprefix("--")] = option, types[name]
    return options


def _describe(option: Option, kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of an option."""
    kinds = {part for part in (get_args(kind) or (kind,)) if part is not type(None)}
    schema: dict[str, Any] = {"type": "string"}
    if kinds == {bool} and option.instead_of is None:
        schema = {"type": "boolean"}
    elif kinds == {int} and option.parse is not parse_gib:
        schema = {"type": "integer"}
    elif kinds == {float}:
        schema = {"type": "number"}
    elif option.choices:
        schema["enum"] = [str(choice) for choice in option.choices]
    return {**schema, "description": option.help.format(choices=", ".join(option.choices))}


def _drop_texts(schema: Any) -> Any:
    """Return a schema without titles and descriptions, which are half of it: docs/schema has them."""
    if isinstance(schema, dict):
        texts = ("title", "description")
        return {
            key: _drop_texts(value)
            for key, value in schema.items()
            if not (key in texts and isinstance(value, str))  # a property may have such a name
        }
    return [_drop_texts(value) for value in schema] if isinstance(schema, list) else schema


def _check_readable(name: str, roots: tuple[Path, ...], *, must_exist: bool = True) -> str:
    """Return `name` if it is a file in one of `roots`; raise UsageError. A name without a file is that of a model."""
    path = Path(name)
    try:
        path = path.expanduser()
        resolved, exists = path.resolve(), path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, of nobody's home, or with a null character
        resolved, exists = path, False
    if not exists and not must_exist:
        return name
    if not any(resolved.is_relative_to(root) for root in roots):
        folders = ", ".join(map(str, roots))
        raise UsageError("this file may not be read", value=name, hint=f"files below {folders} may be (--root)")
    if not exists or name.startswith("-"):
        raise UsageError("there is no such file", value=name, hint="give its path from the server's folder, or whole")
    return name


TOOLS = (
    Tool(
        "will_it_fit", "estimate", "estimate",
        ("params", *_MODEL, "batch-size", "dtype", "quantize", "lora-rank", "optimizer", "parallel"),
    ),
    Tool(
        "profile", "profile", "report",
        (*_MODEL, "batch-size", "mode", "dtype", "amp", "quantize", "optimizer", "adapter", "lora-rank",
         "activation-checkpointing", "gradient-accumulation", "parallel", "alloc-conf", "fix"),
        fixed=("--device=virtual",),
    ),
    Tool(
        "run_script", "run", "report",
        ("gpu", "gpu-vram", "gpus", "ranks", "steps", "timeout", "worst-batch", "suggest-patch", "alloc-conf", "fix"),
        required=("script",), inputs={"script": _FILE, "arguments": _ARGUMENTS},
    ),
    Tool(
        "recommend", "recommend", "recommendation",
        (*_MODEL, "mode", "adapter", "quantize", "dtype", "batch-size", "effective-batch"),
    ),
    Tool(
        "doctor", "doctor", "diagnoses", ("model", "batch-size", "context-length"),
        inputs={"file": _FILE, "text": _TEXT},
    ),
    Tool(
        "analyze_snapshot", "analyze", "analysis", ("alloc-conf", "top"), required=("file",), inputs={"file": _FILE},
    ),
    Tool(
        "serving_plan", "recommend", "engine-budget",
        ("engine", *_MODEL, "engine-release", "concurrency", "quantize", "gguf-type", "kv-cache-dtype",
         "memory-utilization", "max-num-seqs", "max-num-batched-tokens", "max-loras", "lora-rank"),
        required=("engine",),
        summary="What an inference engine does with a GPU's memory at start-up, and how many requests it holds.",
    ),
)  # fmt: skip
