"""Writes docs/schema/*.json, a schema for each command's JSON, from the types of memprof's documents: `make docs`.

What a name means is read from the comment on its field's line or above it, from the string below it, or from the lines
on it in its class's docstring.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
import types
import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from memprof.ledger.bridge import Bridge
from memprof.report.documents import command_results, estimate, verification
from memprof.report.documents.analysis import Analysis
from memprof.report.documents.comparison import Comparison
from memprof.report.documents.recommendation import Recommendation
from memprof.report.documents.report import _RANK_OPTIONAL, Report, Verdict
from memprof.report.documents.sweep import Sweep
from memprof.report.documents.vocabulary import Vocabulary
from memprof.spec import TargetSpec
from memprof.trace.facts import DeviceFacts, RankFacts, Target
from memprof.trace.json_values import json_fields

FOLDER = Path(__file__).resolve().parent / "schema"
DIALECT = "http://json-schema.org/draft-07/schema#"

FILES: dict[str, tuple[tuple[type, ...], str]] = {
    "report": ((Report,), "profile, run, and show of either"),
    "analysis": ((Analysis,), "analyze"),
    "comparison": ((Comparison,), "compare"),
    "estimate": ((estimate.EstimateDocument,), "estimate"),
    "recommendation": ((Recommendation,), "recommend"),
    "engine-budget": ((command_results.EngineBudgetResult,), "recommend --engine"),
    "sweep": ((Sweep,), "sweep"),
    "verification": ((verification.Verification,), "verify"),
    "vocabulary": ((Vocabulary,), "vocab"),
    "diagnoses": ((command_results.DiagnosisList,), "doctor"),
    "installation": ((command_results.InstallationResult,), "doctor --env"),
    "models": ((command_results.ModelList,), "models"),
    "gpus": ((command_results.GpuList,), "gpus"),
    "present-gpus": ((command_results.PresentGpus,), "gpus --present"),
    "monitor": ((command_results.MonitorLine, command_results.MonitorEnd), "monitor: each line"),
    "export": ((command_results.ExportResult,), "export"),
    "topics": ((command_results.TopicList,), "help"),
    "recipes": ((command_results.RecipeList,), "recipes ls and recipes cp"),
    "cached-results": ((command_results.CachedResultList,), "cache"),
    "error": ((command_results.ErrorResult,), "each of them where it fails without an answer"),
}
"""Name of a file -> what it describes, and whose answer that is."""

_OF_FILE = {
    "type": "object",
    "description": "What was taken from a file of settings (--config, --preset); absent: nothing.",
    "properties": {"file": {"type": "string"}, "options": {"type": "array", "items": {"type": "string"}}},
    "required": ["file", "options"],
}
_OPTIONAL: dict[type, tuple[str, ...]] = {
    Report: ("gpu", "gpus", "limit", "patch", "rank", "ranks", "streams", "engine", "over_time"),
    Bridge: ("nccl_group_bytes",),
    RankFacts: _RANK_OPTIONAL,
    DeviceFacts: ("backend", "unified_bytes", "has_bfloat16"),
    Verdict: ("paged_bytes", "max_buffer_bytes"),
    estimate.EstimateRow: tuple(name for field, name, _ in json_fields(estimate.EstimateRow) if field.default is None),
}
"""Fields that are left out where there is nothing to say."""
_BESIDE: dict[type, dict[str, Any]] = {
    verification.Deviation: {"passed": bool},
    verification.Precision: {"passed": bool},
    verification.OptimizerRow: {"passed": bool},
    verification.Verification: {
        "schema": int, "memprof_version": str, "command": str, "source": str, "passed": bool,
        "skipped": list[dict[str, str]],
    },
    Verdict: {"paged_bytes": int},
    Target: {**{name: kind for _, name, kind in json_fields(TargetSpec)}, "asked": dict[str, Any]},
}  # fmt: skip
"""What a class adds to its fields as it is written."""
_SIMPLE: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}


def schema_of(name: str) -> dict[str, Any]:
    """The schema in the file of this name."""
    kinds, whose = FILES[name]
    classes: dict[str, Any] = {}
    found = [_schema(kind, classes) for kind in kinds]
    for kind in kinds:
        if name != "error":
            classes[kind.__name__]["properties"]["options_from_file"] = _OF_FILE
    return {
        "$schema": DIALECT,
        "title": f"The JSON of memprof {whose}",
        "description": "Sizes are bytes, times are seconds. A value that is not known is null. "
        "`schema` in the document goes up when a name changes its meaning; names are added without that.",
        **(found[0] if len(found) == 1 else {"anyOf": found}),
        "definitions": dict(sorted(classes.items())),
    }


def _schema(kind: Any, classes: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; dataclasses go into `classes`, and are referred to."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return {}
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if origin in (typing.Union, types.UnionType):
        found = [_schema(part, classes) for part in parts]
        if all(list(one) == ["type"] for one in found):
            return {"type": [one["type"] for one in found]}
        return {"anyOf": found}
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin is tuple and parts[-1] is not Ellipsis:
        return _row([_schema(part, classes) for part in parts])
    if origin in (tuple, list):
        return {"type": "array", "items": _schema(parts[0], classes)}
    if origin is not None and issubclass(origin, typing.Mapping):
        return {"type": "object", "additionalProperties": _schema(parts[1], classes)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple is a row
        hints = typing.get_type_hints(kind)
        return _row([_schema(hints[name], classes) | {"title": name} for name in kind._fields])
    if not is_dataclass(kind):
        raise TypeError(f"no schema for {kind!r}")
    if kind.__name__ not in classes:
        classes[kind.__name__] = {}  # it may be inside itself
        classes[kind.__name__] = _class(kind, classes)
    return {"$ref": f"#/definitions/{kind.__name__}"}


def _row(columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "array", "items": columns, "minItems": len(columns), "maxItems": len(columns)}


def _class(kind: Any, classes: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            said |= _said(base)
    types_of = {**_BESIDE.get(kind, {}), **{name: hint for _, name, hint in json_fields(kind)}}
    properties = {}
    for name, hint in types_of.items():
        about = {"description": said[name]} if name in said else {}
        found = _schema(hint, classes)
        # Beside a reference the dialect reads nothing.
        properties[name] = about | ({"allOf": [found]} if "$ref" in found and about else found)
    if kind is Report:  # one of a script or a function has none
        properties["target"] = {"anyOf": [_schema(Target, classes), {"type": "object", "maxProperties": 0}]}
    optional = _OPTIONAL.get(kind, ())
    return {
        "type": "object",
        "description": _flat(inspect.getdoc(kind).partition("\n\n")[0]),
        "properties": properties,
        "required": [name for name in types_of if name not in optional],
    }


@functools.cache
def _trees(module: str) -> dict[str, ast.ClassDef]:
    source = inspect.getsource(sys.modules[module])
    return {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


@functools.cache
def _comments(module: str) -> dict[int, tuple[str, bool]]:
    """The comments of a module by their lines, and whether each has its line to itself."""
    source = inspect.getsource(sys.modules[module])
    found = [one for one in tokenize.generate_tokens(io.StringIO(source).readline) if one.type == tokenize.COMMENT]
    said = {one.start[0]: (one.string.removeprefix("# "), one.line.lstrip().startswith("#")) for one in found}
    return {line: one for line, one in said.items() if not one[0].startswith(("fmt:", "noqa", "type:"))}


def _comment(field: ast.AnnAssign, comments: dict[int, tuple[str, bool]]) -> str:
    """The comment on a field's last line, else the lines of comment above it."""
    if field.end_lineno in comments:
        return comments[field.end_lineno][0]
    lines, line = [], field.lineno - 1
    while comments.get(line, ("", False))[1]:
        lines.insert(0, comments[line][0])
        line -= 1
    return " ".join(lines)


def _said(kind: type) -> dict[str, str]:
    """What the source says of each field of a class."""
    node = _trees(kind.__module__)[kind.__name__]
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    block = re.search(r"(?:Attributes|Args):\n((?:    .*\n?|\n)+)", text)
    said = {}
    for names, about in re.findall(
        r"^(\w[\w, ]*): (.*(?:\n +.*)*)", textwrap.dedent(block[1]) if block else "", re.MULTILINE
    ):
        said |= dict.fromkeys(names.split(", "), _flat(about))
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        if comment := _comment(field, _comments(kind.__module__)):
            said.setdefault(field.target.id, comment)  # beside a line in the docstring it says why
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said[field.target.id] = _flat(inspect.cleandoc(after.value.value))
    names = {field.name: name for field, name, _ in json_fields(kind)}
    return {names.get(name, name): about for name, about in said.items()}


def _flat(text: str) -> str:
    return " ".join(text.split())


def files() -> dict[Path, str]:
    """What stands in each file."""
    return {FOLDER / f"{name}.json": json.dumps(schema_of(name), indent=1) + "\n" for name in FILES}
