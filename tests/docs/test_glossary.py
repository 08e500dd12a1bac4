"""docs/glossary.md holds: the words that it replaces appear in no page, no help text, no output and no docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md"),
]  # fmt: skip
"""Help texts are in docs/cli.md, outputs in many others; a test of each page says that these are current."""


def replaced_words(text: str) -> list[str]:
    """Return the words of the tables' last columns."""
    rows = re.findall(r"^\| (?!term)[^|\n]+ \|[^|\n]+\|([^|\n]*)\|$", text, re.MULTILINE)
    return [word.strip() for cell in rows for word in cell.split(",") if word.strip(" -")]


def pattern_of(words: list[str]) -> re.Pattern[str]:
    """Return what finds any of them as whole words, also plurals, in any case, and over the end of a line."""
    alternatives = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<![\w/.-])(?:{alternatives})s?(?![\w/-])", re.IGNORECASE)


REPLACED = pattern_of(replaced_words(GLOSSARY.read_text(encoding="utf-8")))


def test_words_are_found():
    found = pattern_of(["card", "given back"])
    assert found.findall("Cards, a card: given\n  back. discard, card_index, --card, cards/x") == [
        "Cards",
        "card",
        "given\n  back",
    ]
    assert "card" in replaced_words("| term | meaning | not |\n|---|---|---|\n| GPU | x | card, graphics card |\n")


def test_page():
    for page in set(PAGES) - {GLOSSARY}:
        text = re.sub(r"`[^`\n]*`", "``", page.read_text(encoding="utf-8"))
        text = re.sub(r"\]\([^)]*\)|<!--.*?-->", "", text)
        found = {(text.count("\n", 0, match.start()) + 1, match[0]) for match in REPLACED.finditer(text)}
        assert not found, f"{page}: docs/glossary.md has the word to use instead"


def test_code():
    """String literals, which are output, help and docstrings."""
    for package in sorted(path.name for path in (ROOT / "memprof").iterdir() if path.name != "__pycache__"):
        path = ROOT / "memprof" / package
        found = []
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and (" " in node.value or node.value.istitle())
                ):
                    text = re.sub(r"`[^`\n]*`", "``", node.value)
                    found += [
                        f"{file.relative_to(ROOT)}:{node.lineno}: {match[0]}" for match in REPLACED.finditer(text)
                    ]
        assert not found, "docs/glossary.md has the word to use instead"
