"""What commands answer in JSON is held against docs/schema, and has no name that is not in it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import fastjsonschema

from tests.processes import ROOT

FOLDER = ROOT / "docs" / "schema"
_OF_COMMANDS = {
    "analyze": "analysis", "compare": "comparison", "estimate": "estimate", "recommend": "recommendation",
    "recommend --engine": "engine-budget",
    "sweep": "sweep",
    "verify": "verification", "vocab": "vocabulary", "doctor": "diagnoses", "doctor --env": "installation",
    "models": "models", "gpus": "gpus", "gpus --present": "present-gpus", "monitor": "monitor", "export": "export",
    "help": "topics", "cache": "cached-results", "recipes ls": "recipes", "recipes cp": "recipes",
}  # fmt: skip


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """`document`, if it is as its schema says; fastjsonschema's JsonSchemaException says where it is not."""
    name = "error" if "error" in document else _OF_COMMANDS.get(document["command"], "report")
    validator(name)(document)
    return document


@functools.cache
def validator(name: str) -> Callable[[Any], Any]:
    """Of the schema in the file of this name, and of nothing that it does not name."""
    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return fastjsonschema.compile(_closed(schema), use_default=False)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed["additionalProperties"] = False
    return closed
