"""The facts in a text: sizes, shares, counts, shapes, data types, operators and lines. Its words may change."""

from __future__ import annotations

import re

from memprof.findings import Finding

_FACT = re.compile(
    r"[\w/.]+\.py:\d+|aten\.\w+|\[[\dx ]+\]|(?:b?float|u?int)\d+|bool|[\w.]*\*[\w.]*"
    r"|(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?: [KMG]iB|%)?(?!\w|\.\w)"
)


def figures(text: str) -> list[str]:
    """Return the facts in `text`, in their order."""
    return _FACT.findall(text)


def all_figures(finding: Finding) -> list[list[str]]:
    """Return those of the title, and those of each line of evidence."""
    return [figures(finding.title), *(figures(evidence.text) for evidence in finding.evidence)]
