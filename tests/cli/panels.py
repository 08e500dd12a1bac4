"""Read what `--help` shows of a command, and what there is."""

from __future__ import annotations

import typer

from memprof.cli.main import app


def all_commands():
    root = typer.main.get_command(app)
    return {name: root.get_command(typer.Context(root), name) for name in root.commands}


def panels_of(shown: str) -> dict[str, list[str]]:
    """Return the lines inside each panel, by its title."""
    found: dict[str, list[str]] = {}
    for line in shown.splitlines():
        if line.startswith("╭─"):
            title = line.strip("╭─╮ ")
            found[title] = []
        elif line.startswith("│"):
            found[title].append(line[2:].rstrip("│ "))
    return found
