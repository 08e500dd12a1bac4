"""What a program of the corpus is, how it is run, and what must hold of its report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).resolve().parent / "drivers"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRACKIO_DISABLED": "1", "WANDB_MODE": "disabled"}
_FIRST = "memprof_corpus.py"  # what stands in front of a program that would download something
_RUN = """
import runpy, sys
from pathlib import Path

del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Right:
    findings: frozenset[str] = frozenset()  # Those that are right, by id; no other may be there.
    # For a category that the program has hardly anything of: the largest share of the peak, as a fraction.
    at_most: dict[str, float] = field(default_factory=dict)
    not_stages: frozenset[str] = frozenset()  # Stages that no part of its model is.
    layers: bool = False  # Its layers must be stages.
    known: str = ""  # What is known to be wrong; a check must then fail.


@dataclass(frozen=True, kw_only=True)
class Program(Right):
    """A public program, and how two of its steps are run.

    Nothing of it is here: it is taken from a folder of checkouts, under the name of its repository.
    """

    name: str
    repository: str  # As `owner/name` of GitHub.
    commit: str
    command: str
    checkout: str = ""  # Its folder among the checkouts; empty: the repository's name.
    driver: bool = False  # The command's program is of ours, in drivers/: for a library without a program of its own.
    folder: str = "."  # Of the checkout; the program runs in a copy of it.
    data: Callable[[Path], None] | None = None  # Writes small synthetic data into that folder.
    before: str = ""  # Python that runs first, in place of downloads.
    options: str = "--gpu rtx-4090"
    seconds: float = 60  # How long it may take.
    path: tuple[str, ...] = ()  # Folders to import from, beside the program's own.

    def slug(self) -> str:
        return self.name.replace(" ", "_")

    def missing(self, fetched: Path) -> str:
        """Why it cannot be run; empty if it can."""
        if not (fetched / self.at() / self.folder).is_dir():
            return f"no checkout of {self.repository} in {fetched}"
        return ""

    def at(self) -> str:
        return self.checkout or self.repository.split("/")[1]


@dataclass(frozen=True)
class Result:
    exit_code: int
    report: dict[str, Any]  # Of --json; empty if there was none.
    stderr: str
    seconds: float

    def findings(self) -> set[str]:
        return {finding["id"] for finding in self.report.get("findings", ())}

    def wrong(self, right: Right) -> str:
        """What does not hold, in one line; empty if all does."""
        report = self.report
        if self.exit_code:
            last = (self.stderr.strip() or "nothing on stderr").splitlines()[-1]
            return f"exit code {self.exit_code}: {last[:160]}"
        if not report or report["failure"] is not None or report["verdict"]["fits"] is not True:
            return "no verdict that it fits"
        if report["program"]["exit_code"] not in (0, None):
            return f"it ended with {report['program']['exit_code']}"
        peak = report["peak"]
        if sum(peak["categories"].values()) != peak["allocated_bytes"] or not peak["allocated_bytes"]:
            return "the categories at the peak do not add up to it"
        if report["program"]["steps"] and not peak["categories"].get("parameters"):
            return "no parameters at the peak of a program that trains"
        for category, share in right.at_most.items():
            if peak["categories"].get(category, 0) > share * peak["allocated_bytes"]:
                return f"more than {share:.0%} of the peak is called {category}"
        stages = {stage["name"] for stage in report["stages"]}
        if stages & right.not_stages:
            return f"stages that the model does not have: {', '.join(sorted(stages & right.not_stages))}"
        if right.layers and not any("layer" in stage for stage in stages):
            return "no layer is a stage"
        told = self.findings() - right.findings
        return f"findings that are not right: {', '.join(sorted(told))}" if told else ""


def run(program: Program, fetched: Path, seconds: float | None = None) -> Result:
    """Run a program of the corpus as a user would, in a process of its own and in a copy of its folder."""
    seconds = program.seconds if seconds is None else seconds
    with tempfile.TemporaryDirectory(prefix="memprof-program-") as temporary:
        home = Path(temporary)
        checkout = home / program.at()
        shutil.copytree(fetched / checkout.name, checkout, ignore=shutil.ignore_patterns(".git"), symlinks=True)
        folder = checkout / program.folder
        if program.data is not None:
            program.data(folder)
        command = program.command.split()
        if program.driver:
            shutil.copy(DRIVERS / command[0], folder / f"corpus_{command[0]}")
            command[0] = f"corpus_{command[0]}"
        if program.before:
            (folder / _FIRST).write_text(program.before + _RUN, encoding="utf-8")
            command.insert(next(at for at, word in enumerate(command) if word.endswith(".py")), _FIRST)
        own = [str(folder / name) for name in program.path]
        path = os.pathsep.join([str(ROOT), *own, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **_OFFLINE, "HF_HOME": str(home / "hf"), "PYTHONPATH": path}
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "memprof", "run", "--json", *program.options.split(), *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Result(124, {}, f"not done after {seconds:.0f} s", seconds)
        taken = time.monotonic() - began
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {}
    return Result(done.returncode, report, done.stderr, taken)
