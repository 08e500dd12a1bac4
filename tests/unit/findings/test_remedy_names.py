"""Every remedy that a rule names is one that memprof has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import memprof.findings
from memprof.remedy_catalog import REMEDIES

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")


def named() -> set[str]:
    """The strings of all tuples and sets of names in the rules, and what is added to a set."""
    found: set[str] = set()
    for file in Path(memprof.findings.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts: list[ast.expr] = []
            if isinstance(node, (ast.Tuple, ast.Set)):
                parts = node.elts
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
                parts = node.args
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            if values and len(values) == len(parts) and all(isinstance(v, str) and _NAME.fullmatch(v) for v in values):
                found.update(values)
    return found


def test_rules_name_remedies_of_the_catalog():
    names = named()
    assert {"chunked-loss", "device-placement", "expandable-segments", "micro-batch", "low-rank-npt"} <= names
    assert names <= set(REMEDIES)
