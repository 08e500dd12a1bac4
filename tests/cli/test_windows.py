"""Windows, simulated by what its Python lacks: what runs no program works, and the rest is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python

WINDOWS = """
import mmap, os, signal, sys
import torch, transformers
for module, names in ((mmap, "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED"), (signal, "SIGKILL SIGURG SIGHUP"), (os, "fork")):
    for name in names.split():
        delattr(module, name)
from memprof.cli.main import run
run(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("run train.py", marks=pytest.mark.nightly),
        pytest.param("profile --model gpt2 --context-length 64 --no-cache", marks=pytest.mark.nightly),
        pytest.param("recommend --gpu-vram 8 --no-cache", marks=pytest.mark.nightly),
    ],
)
def test_what_would_run_a_program_names_wsl(words: str, tmp_path: Path) -> None:
    """In a new process: one that is forked from another has imported the virtual GPU."""
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-c", WINDOWS, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    problem, value, hint = done.stderr.splitlines()
    assert problem.startswith("memprof: Windows is not supported for") and value and "WSL" in hint


@pytest.mark.parametrize("words", ["estimate --model gpt2", "recommend --engine vllm --model gpt2 --gpu rtx-4090"])
def test_what_needs_no_run_works(words: str) -> None:
    done = python("-c", WINDOWS, *words.split())
    assert done.exit_code in (0, 3) and not done.stderr and done.stdout
