"""The day, run as it is; and that every program it would start is there."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import steps
from tests.gpu.budget import PACKING_S, Budget
from tests.gpu.day import Day
from tests.gpu.packing import MAX_BYTES
from tests.gpu.settings import ROOT, STEPS, Settings
from tests.gpu.task import Task


def test_whole(tmp_path: Path) -> None:
    """The real entry: one step runs, what needs CUDA or more time is skipped and listed."""
    asked = {"GPU_DAY_DEVICE": "cpu", "GPU_DAY_STEPS": "truth opinfo", "GPU_DAY_SECONDS": str(44 + PACKING_S)}
    environment = {**os.environ, **asked, "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    assert set(files) == {"summary.txt", "log.txt", "probe.tgz"}
    assert max(files.values()) < MAX_BYTES
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in (out / "summary.txt").read_text().splitlines()}
    assert lines["probe/machine"].startswith("passed")
    for name in ("truth/record", "truth/compare"):
        assert lines[name].startswith("skipped") and lines[name].endswith("needs CUDA")
    assert lines["operators/opinfo"].startswith("skipped") and lines["operators/opinfo"].endswith("it needs 45")
    assert len(lines) == 4
    log = (out / "log.txt").read_text()
    assert all(name in log for name in lines) and "1 passed, 0 failed, 0 late, 3 skipped" in log
    # A step's results are gone from the temporary folder, and nothing else is left there.
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("gpu-day-")] == []


@pytest.mark.nightly
def test_every_step_on_the_cpu(tmp_path: Path) -> None:
    """The whole of `GPU_DAY_DEVICE=cpu make gpu`."""
    environment = {**os.environ, "GPU_DAY_DEVICE": "cpu", "OUT": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert all(" passed " in line or line.endswith("needs CUDA") for line in lines)
    assert {line.partition("/")[0] for line in lines if " passed " in line} == {
        "probe",
        "kineto",
        "commands",
        "operators",
    }


class Listing(Day):
    """Starts nothing, and keeps what would be."""

    def start(self, task: Task) -> None:
        self.tasks = [*getattr(self, "tasks", []), task]

    def run(self, task: Task) -> bool:
        self.start(task)
        return True


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_program_of_every_step_is_there(device: str, tmp_path: Path) -> None:
    with Listing(Settings(device, out=tmp_path), Budget(570), tmp_path) as day:
        for name in STEPS:
            steps.RUN[name](day)
    assert len({task.name for task in day.tasks}) == len(day.tasks)
    folders = {task.name.partition("/")[0] for task in day.tasks}
    assert len(folders) + len(["summary.txt", "log.txt"]) <= 8
    assert all(0 < task.needs <= task.limit for task in day.tasks)
    for task in day.tasks:
        for option, name in itertools.pairwise(task.command):
            if option == "-m" and name.startswith("tests."):
                assert any((ROOT / name.replace(".", "/")).with_suffix(suffix).exists() for suffix in ("", ".py")), name
        for word in task.command:
            assert not word.startswith(str(ROOT)) or Path(word).exists(), word
