"""What stands beside the code for the people who use it is of this version, and can be read."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import memprof

ROOT = Path(__file__).resolve().parents[2]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == memprof.__version__


def test_the_changelog_begins_with_what_is_not_released() -> None:
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title) for title in titles[1:])


def test_issues_ask_for_the_installation() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        labels = [field["attributes"]["label"] for field in form["body"]]
        assert "Installation" in labels and form["name"] and form["description"]
