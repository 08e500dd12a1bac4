"""How the tests run the programs beside them, and read their reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.processes import python

PROGRAMS = Path(__file__).resolve().parent / "programs"


def program(name: str, *arguments: str) -> list[str]:
    """The command line of one program, for after `memprof run`."""
    return [str(PROGRAMS / f"{name}.py"), *arguments]


def run_twice(name: str, *arguments: str, folder: Path) -> dict[str, Any]:
    """See twice.py; its stderr is added."""
    result = folder / "result.json"
    done = python("-m", "tests.scripts.twice", str(result), *program(name, *arguments), folder=folder)
    assert result.exists(), done.stderr[-4000:]
    return {**json.loads(result.read_text(encoding="utf-8")), "stderr": done.stderr}


def memprof_run(*options: str, of: list[str], folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and stderr of `memprof run --json`."""
    done = python("-m", "memprof", "run", "--json", *options, *of, folder=folder)
    return done.exit_code, json.loads(done.stdout or "{}"), done.stderr


def stages(report: dict[str, Any], step: int | None = None) -> set[str]:
    """The names of a report's stages, of one step; all that an evaluation has are one."""
    names = [row["name"] for row in report["stages"] if step is None or row["step"] == step]
    return {"evaluation" if name.startswith("evaluation ") else name for name in names}


def check_sound(report: dict[str, Any]) -> None:
    """What every report of a script that fits has to show."""
    assert report["failure"] is None and report["verdict"]["fits"]
    peak = report["peak"]
    assert sum(peak["categories"].values()) == peak["allocated_bytes"] > 0
    assert {"context", "parameters"} <= stages(report)
