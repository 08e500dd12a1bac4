"""What pyproject.toml offers to install, and what the program and the documentation say to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from memprof.errors import REQUIREMENTS
from memprof.installer import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_FOR_USERS = {"all", "dev", "nightly"}
NAMED = re.compile(r"torch-memprof\[([a-z,]+)\]")


def _named(text):
    return {extra for names in NAMED.findall(text) for extra in names.split(",")}


def test_errors_ask_for_the_libraries_of_the_extras():
    """By their own names: `pip install 'memprof[html]'` would fetch another program from PyPI."""
    offered = {line for extra in set(EXTRAS) - NOT_FOR_USERS for line in EXTRAS[extra]}
    assert set(REQUIREMENTS.values()) == offered
    assert all(re.match(r"[a-z]+", requirement)[0] == package for package, requirement in REQUIREMENTS.items())


def test_nobody_is_sent_to_the_other_memprof_of_pypi():
    texts = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("memprof/**/*.py")]
    told = [path for path in texts if re.search(r"(pip|pipx|uv)[^\n]* install [^\n]*memprof\[", path.read_text())]
    assert not told


def test_hints_name_the_distribution():
    assert PROJECT["name"] == DISTRIBUTION


def test_all_is_every_extra_for_users():
    assert _named(*EXTRAS["all"]) == set(EXTRAS) - NOT_FOR_USERS
