"""Facts about a program in the comment that it begins with, a line `# key: value` for each."""

from __future__ import annotations

import re


def read_header(lines: list[str]) -> dict[str, str]:
    """Return key -> value; other lines of the comment are for the reader."""
    said: dict[str, str] = {}
    for line in lines:
        if not line.startswith("# "):
            break
        found = re.fullmatch(r"# (\w+): (.*)", line)
        if found:
            said[found[1]] = found[2]
    return said
