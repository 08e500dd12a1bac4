"""macOS, simulated by what its Python lacks (../shared/platforms): planted programs, and commands of memprof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.planted import Told, programs, wrong
from tests.processes import ROOT

pytestmark = pytest.mark.nightly

PROGRAMS = programs()
COMMANDS = ("analyze", "compare", "doctor", "errors", "estimate", "recommend_engine", "vocab")  # of tests/cli


@pytest.fixture
def macos(shared_dir: Path) -> dict[str, str]:
    """The environment of a process that takes its platform for macOS."""
    folder = shared_dir / "platforms"
    if not (folder / "sitecustomize.py").is_file():
        pytest.skip(f"no shared data: {folder} has no simulated platforms")
    return {**os.environ, "PLATFORM": "mac", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_the_platform_is_simulated(macos: dict[str, str]) -> None:
    code = "import os, sys; print(sys.platform, hasattr(os, 'memfd_create'))"
    done = subprocess.run([sys.executable, "-c", code], env=macos, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["darwin", "False"]


@pytest.mark.parametrize("name", list(PROGRAMS)[::10])
def test_a_program_has_its_verdict(name: str, macos: dict[str, str], tmp_path: Path) -> None:
    program = PROGRAMS[name]
    command = [sys.executable, "-m", "memprof", "run", "--json", *program.options, program.path]
    done = subprocess.run(command, env=macos, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = Told(done.returncode, json.loads(done.stdout or "{}"), done.stderr)
    assert not wrong(program, told), told.stderr[-2000:]


def test_commands(macos: dict[str, str]) -> None:
    files = [f"tests/cli/test_{name}.py" for name in COMMANDS]
    # The simulation imports torch, and before pytest a library with a plugin for it.
    without = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "-k", "not torch")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *without, *files]
    done = subprocess.run(command, env=macos, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
