"""One line for each program: what became of it, and how long it took."""

from __future__ import annotations

from enum import Enum
from pathlib import Path


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    LATE = "late"
    SKIPPED = "skipped"


class Summary:
    """The file summary.txt, which is up to date after every line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: list[Outcome] = []
        path.write_text("", encoding="utf-8")

    def add(self, name: str, outcome: Outcome, seconds: float = 0, note: str = "") -> str:
        self._outcomes.append(outcome)
        line = f"{name:<32} {outcome.value:<8} {seconds:6.1f} s  {note}".rstrip()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return line

    @property
    def is_clean(self) -> bool:
        return not {Outcome.FAILED, Outcome.LATE} & set(self._outcomes)

    def total(self) -> str:
        return ", ".join(f"{self._outcomes.count(one)} {one.value}" for one in Outcome)
