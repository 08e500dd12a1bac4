"""Programs whose verdict is known because they were made for it, and what memprof says of them.

A program says what is right of it in the comment that it begins with, a line for each of

    # fits: yes, no or none (no verdict)
    # exit: the exit code of `memprof run`
    # step: in which step it runs out of memory, where it does
    # grows: by how many MiB a step, where each step adds the same; memory of a program with neither this nor a
    #     culprit does not grow
    # run: options of `memprof run`
    # ends: no, where it goes on for ever, or for longer than a test may
    # why: the arithmetic
    # known: the verdict is right, and the line at fault is not named, for this reason

The line at fault ends with `# <- culprit`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.headers import read_header
from tests.processes import python

FOLDER = Path(__file__).resolve().parent / "programs"
_MIB = 1 << 20
CAUSES = ("memory-growth", "idle-memory", "evaluation-accumulates")  # findings that name one line of the program
_KEYS = {"fits", "exit", "step", "grows", "run", "ends", "why", "known"}
_FITS = {"yes": True, "no": False, "none": None}


@dataclass(frozen=True)
class Planted:
    path: Path
    fits: bool | None
    exit_code: int
    step: int | None
    grows_bytes: int | None
    options: tuple[str, ...]
    ends: bool
    culprit: str | None  # As reports name a line, `file.py:12`.
    known: bool  # Whether it is known not to be named.

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"


def read(path: Path) -> Planted:
    """Read what a program says of itself; ValueError if a line is not understood, or one that must be there is not."""
    lines = path.read_text(encoding="utf-8").splitlines()
    said = read_header(lines)
    if said.keys() - _KEYS or {"fits", "exit", "why"} - said.keys():
        raise ValueError(f"{path}: says {', '.join(said)}")
    culprits = [number for number, line in enumerate(lines, 1) if line.endswith("# <- culprit")]
    if len(culprits) > 1:
        raise ValueError(f"{path}: {len(culprits)} culprits")
    return Planted(
        path=path,
        fits=_FITS[said["fits"]],
        exit_code=int(said["exit"]),
        step=int(said["step"]) if "step" in said else None,
        grows_bytes=round(float(said["grows"]) * _MIB) if "grows" in said else None,
        options=tuple(said.get("run", "").split()),
        ends=said.get("ends", "yes") == "yes",
        culprit=f"{path.name}:{culprits[0]}" if culprits else None,
        known="known" in said,
    )


def programs() -> dict[str, Planted]:
    found = [read(path) for path in sorted(FOLDER.glob("*/*.py"))]
    return {one.name: one for one in found}


@dataclass(frozen=True)
class Told:
    exit_code: int
    report: dict[str, Any]
    stderr: str

    @property
    def fits(self) -> bool | None:
        """The verdict; None also where there is no report."""
        return self.report.get("verdict", {}).get("fits")

    @property
    def step(self) -> int | None:
        """The step in which memory runs out, seen or predicted."""
        verdict = self.report.get("verdict", {})
        return verdict.get("oom_step") or (verdict.get("growth") or {}).get("runs_out_step")

    @property
    def growth_bytes(self) -> int | None:
        return (self.report.get("verdict", {}).get("growth") or {}).get("bytes_per_step")

    @property
    def grows(self) -> bool:
        """Whether growth is a finding or a part of the verdict."""
        return self.growth_bytes is not None or any(
            finding["id"] == "memory-growth" for finding in self.report.get("findings", ())
        )

    def names(self, line: str) -> bool:
        """Whether the first finding or the failure is about a line, `file.py:12`."""
        first = self.report.get("findings", ())[:1]
        return is_about(json.dumps(self.report.get("failure")), line) or any(is_about(one, line) for one in first)

    def list_other_causes(self, line: str | None) -> list[str]:
        """Return the titles of the findings that name another line than `line` as a cause."""
        causes = (one for one in self.report.get("findings", ()) if one["id"] in CAUSES and one["severity"] != "note")
        titles = [one["title"] for one in causes if line is None or not is_about(one, line)]
        return [title for title in titles if re.search(r"\.py:\d", title)]


def is_about(found: Any, line: str) -> bool:
    """Whether a finding, or a text, is about a line, `file.py:12`."""
    if isinstance(found, str):
        return re.search(rf"\b{re.escape(line)}\b", found) is not None
    return any(
        is_about(text, line) for text in (found["title"], *(f"{e['text']} {e['source']}" for e in found["evidence"]))
    )


def run(program: Planted, *options: str, folder: Path) -> Told:
    done = python("-m", "memprof", "run", "--json", *program.options, *options, program.path, folder=folder)
    return Told(done.exit_code, json.loads(done.stdout or "{}"), done.stderr)


def wrong(program: Planted, told: Told) -> list[str]:
    """List what is not right of what is said, a line for each."""
    found = []
    if told.exit_code != program.exit_code:
        found.append(f"exit code {told.exit_code}, not {program.exit_code}")
    if told.fits is not program.fits:
        found.append(f"fits: {told.fits}, not {program.fits}")
    if not told.report:
        found.append("no report")
    if program.step is None and told.step is not None and program.fits is not True:
        found.append(f"runs out of memory in step {told.step}, where it does not")
    if program.step is not None and not is_near(told.step, program.step):
        found.append(f"runs out of memory in step {told.step}, not {program.step}")
    if program.grows_bytes and told.growth_bytes and abs(told.growth_bytes / program.grows_bytes - 1) > 0.1:
        found.append(f"grows by {told.growth_bytes:,} bytes a step, not {program.grows_bytes:,}")
    if program.culprit and told.names(program.culprit) is program.known:
        found.append(f"{program.culprit} is named" if program.known else f"not first: {program.culprit}")
    if not program.known:
        found += [f"also told: {title}" for title in told.list_other_causes(program.culprit)]
    if not program.culprit and not program.grows_bytes and told.grows:
        found.append("memory that does not grow is said to")
    return found


def is_near(step: int | None, right: int) -> bool:
    """Whether a step is the right one: by two steps, or 5%."""
    return step is not None and abs(step - right) <= max(2, 0.05 * right)
