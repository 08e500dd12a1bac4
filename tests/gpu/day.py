"""`Day`: runs programs within the budget, writes log and summary, packs what they leave."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.gpu.budget import Budget
from tests.gpu.packing import MAX_BYTES, pack
from tests.gpu.process import Process
from tests.gpu.settings import ROOT, Settings
from tests.gpu.summary import Outcome, Summary
from tests.gpu.task import Task

# The virtual GPU that is compared with, where nvidia-smi names none.
DEFAULT_GPU = "h100-80gb"
# Packages that the machine lacks, carried there as wheels.
WHEELS = ROOT / ".whl"
_SHOWN_LINES = 6
_NOISE = "USDT:"  # torch's profiler, whenever it starts or stops
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MEMPROF_CACHE": "off",  # an answer of the day before is no measurement
    "COLUMNS": "160",
    "NO_COLOR": "1",
}


@dataclass
class Started:
    task: Task
    process: Process


class Day:
    """A context manager: at its end nothing that it started runs, and all results are packed.

    Args:
        settings: how to run.
        budget: how long.
        work: an empty folder; the programs work in folders of their own there, each of which becomes an archive.
    """

    def __init__(self, settings: Settings, budget: Budget, work: Path) -> None:
        self.settings = settings
        self.budget = budget
        self._work = work
        settings.out.mkdir(parents=True, exist_ok=True)
        self._log = settings.out / "log.txt"
        self._log.write_text("", encoding="utf-8")
        self.summary = Summary(settings.out / "summary.txt")
        self._running: list[Started] = []
        # Folders in which something ran since they were packed.
        self._unpacked: set[Path] = set()
        self._packages = work / "packages"
        # As `--gpu` takes it.
        self.gpu = _gpu_name() or DEFAULT_GPU

    def __enter__(self) -> Day:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for started in self._running:
            started.process.end()
        self._running.clear()
        if error is not None:
            self.say(f"ended by {type(error).__name__}: {error}")
        self.pack()

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, task: Task) -> bool:
        """Run a task to its end; returns whether it has done what it is for."""
        started = self.start(task)
        return started is not None and self.wait(started)

    def start(self, task: Task) -> Started | None:
        """Start a task beside what runs already; None if it is skipped, which the summary says."""
        limit = self.budget.limit(task.needs, task.limit * self.settings.scale)
        if task.needs_cuda and self.settings.device != "cuda":
            return self._skip(task, "needs CUDA")
        if task.needs_package and not self._is_installed(task.needs_package):
            return self._skip(task, f"{task.needs_package} is not installed")
        if limit is None:
            return self._skip(task, f"{max(0, self.budget.left()):.0f} s are left, it needs {task.needs:.0f}")
        folder = self.folder(task)
        started = Started(task, Process(task.command, _output(folder, task), folder, self._environment(task), limit))
        self._running.append(started)
        self._unpacked.add(folder)
        return started

    def wait(self, started: Started) -> bool:
        """Wait for a task and write its line; returns whether it has done what it is for."""
        task = started.task
        code, seconds = started.process.wait()
        self._running.remove(started)
        if code is None:
            line = self.summary.add(task.name, Outcome.LATE, seconds, "ended at its limit")
        elif code in task.exit_codes:
            line = self.summary.add(task.name, Outcome.PASSED, seconds, f"exit code {code}" if code else "")
        else:
            expected = " or ".join(map(str, task.exit_codes))
            line = self.summary.add(task.name, Outcome.FAILED, seconds, f"exit code {code}, expected {expected}")
        self.say(line)
        for text in _last_lines(_output(self.folder(task), task)):
            self.say(f"    {text}")
        return code in task.exit_codes

    def finish(self) -> None:
        """Wait for what still runs beside the steps."""
        for started in list(self._running):
            self.wait(started)

    def _skip(self, task: Task, why: str) -> None:
        self.say(self.summary.add(task.name, Outcome.SKIPPED, note=why))

    # -- surroundings ---------------------------------------------------------------------------------------------

    def folder(self, task: Task) -> Path:
        """Make and return the folder in which a task runs, by the first part of its name."""
        folder = self._work / task.name.partition("/")[0]
        folder.mkdir(exist_ok=True)
        return folder

    def install_wheels(self) -> None:
        """Install the wheels that were carried here, into a folder that the programs import from."""
        wheels = sorted(WHEELS.glob("*.whl"))
        if not wheels:
            return
        options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(self._packages)]
        command = [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        said = f"installed {len(wheels)} wheels" if done.returncode == 0 else f"the wheels: {done.stderr.strip()}"
        self.say(said)

    def _is_installed(self, package: str) -> bool:
        return (self._packages / package).is_dir() or importlib.util.find_spec(package) is not None

    def _environment(self, task: Task) -> dict[str, str]:
        settings_of_allocator = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        inherited = {name: value for name, value in os.environ.items() if name not in settings_of_allocator}
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if task.hides_gpu else {}
        # Where other processes keep the cores busy, torch's threads wait for one another: a step took 1.4 s, not 0.03.
        threads = {"OMP_NUM_THREADS": "1"} if self.settings.device == "cpu" else {}
        path = os.pathsep.join(filter(None, [str(ROOT), str(self._packages), os.environ.get("PYTHONPATH")]))
        return {**inherited, **_ENVIRONMENT, "PYTHONPATH": path, **threads, **hidden, **task.environment}

    # -- results --------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a line, and append it to the log as long as that is small enough to come back."""
        line = f"[{self.budget.elapsed():5.0f} s] {text}"
        print(line, flush=True)
        if self._log.stat().st_size + len(line.encode()) < MAX_BYTES:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def pack(self) -> None:
        """Pack each folder in which something ran since the last time into FOLDER.tgz."""
        still_running = {self.folder(started.task) for started in self._running}
        for folder in sorted(self._unpacked):
            left_out = pack(folder, self.settings.out / f"{folder.name}.tgz")
            if left_out:
                self.say(f"{folder.name}.tgz would be too large with {', '.join(left_out)}")
        self._unpacked = still_running


def _output(folder: Path, task: Task) -> Path:
    return folder / f"{task.name.partition('/')[2]}.txt"


def _last_lines(output: Path) -> list[str]:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:300] for line in lines if line and not line.startswith(_NOISE)][-_SHOWN_LINES:]


def _gpu_name() -> str | None:
    """Return the name of the first GPU; None where nvidia-smi finds none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].removeprefix("NVIDIA ").strip() if done.stdout.strip() else None
    return None
