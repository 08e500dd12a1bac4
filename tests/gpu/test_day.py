"""The day: what becomes of its programs, and that its results are there however it ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import steps
from tests.gpu.budget import PACKING_S, Budget
from tests.gpu.day import Day
from tests.gpu.packing import MAX_BYTES
from tests.gpu.settings import ROOT, STEPS, Settings
from tests.gpu.task import Task


def python(code: str, name: str = "step/program", needs: float = 1, limit: float = 20, **conditions: Any) -> Task:
    return Task(name, [sys.executable, "-c", code], needs=needs, limit=limit, **conditions)


@pytest.fixture
def day(tmp_path: Path) -> Iterator[Day]:
    (tmp_path / "work").mkdir()
    with Day(Settings("cpu", out=tmp_path / "out"), Budget(60), tmp_path / "work") as made:
        yield made


def summary(day: Day) -> list[list[str]]:
    """Name, outcome and note of each line."""
    lines = (day.settings.out / "summary.txt").read_text().splitlines()
    return [[*fields[:2], fields[3][1:].strip()] for fields in (line.split(maxsplit=3) for line in lines)]


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


def test_what_becomes_of_programs(day: Day) -> None:
    assert day.run(python("print('said')"))
    assert not day.run(python("raise SystemExit(3)", "step/fails"))
    assert day.run(python("raise SystemExit(3)", "step/expected", exit_codes=(0, 3)))
    assert day.summary.is_clean is False
    assert not day.run(python("", "step/cuda", needs_cuda=True))
    assert not day.run(python("", "step/package", needs_package="no_such_package"))
    assert not day.run(python("", "step/long", needs=49, limit=50))
    assert summary(day) == [
        ["step/program", "passed", ""],
        ["step/fails", "failed", "exit code 3, expected 0"],
        ["step/expected", "passed", "exit code 3"],
        ["step/cuda", "skipped", "needs CUDA"],
        ["step/package", "skipped", "no_such_package is not installed"],
        ["step/long", "skipped", f"{day.budget.left():.0f} s are left, it needs 49"],
    ]
    assert "said" in (day.settings.out / "log.txt").read_text()


def test_skipping_alone_is_no_failure(day: Day) -> None:
    day.run(python("", needs_cuda=True))
    assert day.summary.is_clean


def test_a_program_ends_at_its_limit_with_what_it_started(day: Day, tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    assert not day.run(python(code, limit=1))
    assert summary(day) == [["step/program", "late", "ended at its limit"]]
    assert not day.summary.is_clean
    assert not _is_running(int(child.read_text()))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_limits_are_scaled(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with Day(Settings("cpu", out=tmp_path / "out", scale=30), Budget(60), tmp_path / "work") as day:
        slow = day.start(python("import time; time.sleep(0.2)", limit=0.1))
        day.finish()
        assert slow is not None and summary(day) == [["step/program", "passed", ""]]


def test_results_are_packed_however_the_day_ends(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    out = tmp_path / "out"
    result = tmp_path / "work" / "step" / "result"

    def run_and_leave() -> None:
        with Day(Settings("cpu", out=out), Budget(60), tmp_path / "work") as day:
            day.start(python("open('result', 'w').write('kept'); import time; time.sleep(60)"))
            while not result.exists():
                time.sleep(0.01)
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        run_and_leave()
    with tarfile.open(out / "step.tgz") as tar:
        assert set(tar.getnames()) == {"step/result", "step/program.txt"}
    assert "ended by SystemExit: 143" in (out / "log.txt").read_text()


def test_only_folders_that_changed_are_packed_again(day: Day) -> None:
    day.run(python("", "first/program"))
    day.pack()
    archive = day.settings.out / "first.tgz"
    archive.unlink()
    day.run(python("", "second/program"))
    day.pack()
    assert not archive.exists() and (day.settings.out / "second.tgz").exists()


def test_programs_have_an_environment_of_their_own(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    asks = "import os; raise SystemExit('PYTORCH_CUDA_ALLOC_CONF' in os.environ)"
    assert day.run(python(asks))
    assert not day.run(python(asks, environment={"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}))
    assert day.run(python("import os; raise SystemExit(os.environ['CUDA_VISIBLE_DEVICES'] != '')", hides_gpu=True))
    assert day.run(python("import os; raise SystemExit(os.environ['OMP_NUM_THREADS'] != '1')"))


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
