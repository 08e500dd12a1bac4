"""What rules ask the table of remedies for is known there, and it names remedies that memprof has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memprof.doctor
import memprof.findings
from memprof.ledger.categories import Category
from memprof.remedies.catalog import REMEDIES, helping

ASK = ("suggest_fixes", "helping", "_against", "_only")


def problems(package) -> set[str]:
    """The strings for which the files of a package ask the table for remedies, also those of `problems.append`."""
    found: set[str] = set()
    for file in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
                if name in (*ASK, "problems.append"):
                    inside = [part for argument in node.args for part in ast.walk(argument)]
                    found |= {part.value for part in inside if isinstance(part, ast.Constant) and part.value}
    return found


def test_rules_name_remedies_of_the_catalog():
    asked = problems(memprof.findings) | {category.value for category in Category}
    names = {remedy.name for problem in asked for remedy in helping(problem)}
    assert {"chunked-loss", "device-placement", "expandable-segments", "micro-batch", "low-rank-npt"} <= names
    assert names <= set(REMEDIES)


@pytest.mark.parametrize("package", [memprof.findings, memprof.doctor], ids=lambda package: package.__name__)
def test_what_is_asked_for_has_an_answer(package):
    asked = problems(package)
    assert len(asked) > 5 and all(helping(problem) for problem in asked)


def test_the_table_helps_against_nothing_that_is_not_asked_for():
    asked = problems(memprof.findings) | problems(memprof.doctor) | {category.value for category in Category}
    assert {problem for remedy in REMEDIES.values() for problem in remedy.helps} <= asked
    assert all(set(remedy.words) <= set(remedy.helps) for remedy in REMEDIES.values())
