"""Read what `--help` shows of a command."""

from __future__ import annotations


def panels_of(shown: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in shown.splitlines():
        if line.startswith("╭─"):
            title = line.strip("╭─╮ ")
            found[title] = []
        elif line.startswith("│"):
            found[title].append(line[2:].rstrip("│ "))
    return found
