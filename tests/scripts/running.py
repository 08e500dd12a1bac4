"""How the tests run the programs beside them, and read their reports."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRACKIO_DISABLED": "1"}
_SECONDS = 300


class Done(NamedTuple):
    """A process that ended."""

    exit_code: int
    stdout: str
    stderr: str


@functools.cache
def _server() -> subprocess.Popen[str]:
    home = tempfile.mkdtemp(prefix="memprof-hf-")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.scripts.server"],
        cwd=ROOT,
        env={**os.environ, **_OFFLINE, "PYTHONPATH": str(ROOT), "HF_HOME": home},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    @atexit.register
    def end() -> None:
        server.kill()
        shutil.rmtree(home, ignore_errors=True)

    return server


def python(module: str, *arguments: str, folder: Path) -> Done:
    """`python -m module` in `folder`, without network, in a process that has the libraries already: see server.py."""
    server = _server()
    assert server.stdin and server.stdout
    request = {"module": module, "arguments": arguments, "folder": str(folder), "seconds": _SECONDS}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    exit_code = int(server.stdout.readline())
    return Done(exit_code, *((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")))


def program(name: str, *arguments: str) -> list[str]:
    """The command line of one program, for after `memprof run`."""
    return [str(PROGRAMS / f"{name}.py"), *arguments]


def run_twice(name: str, *arguments: str, folder: Path) -> dict[str, Any]:
    """See twice.py; its stderr is added."""
    result = folder / "result.json"
    done = python("tests.scripts.twice", str(result), *program(name, *arguments), folder=folder)
    assert result.exists(), done.stderr[-4000:]
    return {**json.loads(result.read_text(encoding="utf-8")), "stderr": done.stderr}


def memprof_run(*options: str, of: list[str], folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and stderr of `memprof run --json`."""
    done = python("memprof", "run", "--json", *options, *of, folder=folder)
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
