"""What rules ask the table of fixes for is known there, and it names fixes that memprof has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memprof.doctor
import memprof.findings
from memprof.findings.rules import import_rules
from memprof.findings.suggestions import PROPOSAL_RULES
from memprof.fixes.catalog import FIXES, find_fixes_for

ASK = ("suggest_fixes", "find_fixes_for", "_list_fix_advice")


def problems(package) -> set[str]:
    """The strings for which the files of a package ask the table for fixes."""
    found: set[str] = set()
    for file in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("evidence.")
                if name in ASK:
                    inside = [part for argument in node.args for part in ast.walk(argument)]
                    found |= {part.value for part in inside if isinstance(part, ast.Constant) and part.value}
    return found


def test_rules_name_fixes_of_the_catalog():
    names = {fix.name for problem in problems(memprof.findings) for fix in find_fixes_for(problem)}
    assert {"device-placement", "expandable-segments", "low-rank-npt"} <= names <= set(FIXES)
    import_rules()
    proposed = {rule.fix for rule in PROPOSAL_RULES.values()} - {None}
    assert {"chunked-loss", "micro-batch", "activation-checkpointing"} <= proposed <= set(FIXES)


@pytest.mark.parametrize("package", [memprof.findings, memprof.doctor], ids=lambda package: package.__name__)
def test_what_is_asked_for_has_an_answer(package):
    asked = problems(package) - {"parameters"}  # a word of a condition
    assert len(asked) > 3 and all(find_fixes_for(problem) for problem in asked)


def test_the_table_helps_against_nothing_that_is_not_asked_for():
    asked = problems(memprof.findings) | problems(memprof.doctor)
    assert {problem for fix in FIXES.values() for problem in fix.helps} <= asked
    assert all(set(fix.doctor_texts) <= set(fix.helps) for fix in FIXES.values())
