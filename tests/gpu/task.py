"""A program that the day starts, and under which conditions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """One line of the summary."""

    # `folder/program`: it runs in that folder, and what it prints goes to program.txt there.
    name: str
    command: Sequence[str]
    # Seconds without which it gives no result; where less is left, it is skipped.
    needs: float
    # Seconds after which it is ended.
    limit: float
    # Skipped with GPU_DAY_DEVICE=cpu.
    needs_cuda: bool = False
    # It sees no GPU, as on a machine that has none.
    hides_gpu: bool = False
    # Skipped where this module is not installed.
    needs_package: str = ""
    # Those with which it has done what it is for.
    exit_codes: tuple[int, ...] = (0,)
    # Variables beside those that all programs get.
    environment: Mapping[str, str] = field(default_factory=dict)


def module(name: str, *arguments: object) -> list[str]:
    """Return the command `python -m NAME ARGUMENTS`, with the interpreter that runs the day."""
    return [sys.executable, "-m", name, *map(str, arguments)]


def script(path: Path, *arguments: object) -> list[str]:
    """Return the command `python PATH ARGUMENTS`, likewise."""
    return [sys.executable, str(path), *map(str, arguments)]
