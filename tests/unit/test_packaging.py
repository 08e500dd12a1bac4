"""What pyproject.toml offers to install, and what the program and the documentation say to install."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from memprof.fixes.catalog import packages

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = re.compile(r"memprof\[([a-z,]+)\]")


def _named(text):
    return {extra for names in NAMED.findall(text) for extra in names.split(",")}


def test_every_extra_that_a_text_names_exists():
    named = set().union(*(_named(path.read_text()) for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]))
    assert {"adapters", "parquet"} <= named <= set(EXTRAS)


def test_every_extra_that_an_error_names_exists():
    named = [
        node.args[2]
        for path in ROOT.glob("memprof/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "not_installed"
    ]
    literal = {extra.value for extra in named if isinstance(extra, ast.Constant)}
    assert literal | set(packages.EXTRAS.values()) == set(EXTRAS) - {"all", "dev"}


def test_all_is_every_extra_but_dev():
    assert _named(*EXTRAS["all"]) == set(EXTRAS) - {"all", "dev"}
