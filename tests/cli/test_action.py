"""The action for pull requests: its script, in a repository with two commits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
model = torch.nn.Linear({width}, {width}).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, {width}, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(repository: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    bin_folder = Path(sys.executable).parent
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "GITHUB_"))}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


def commit(repository: Path, width: int) -> None:
    (repository / "train.py").write_text(SCRIPT.format(width=width))
    run(repository, "git", "add", ".")
    done = run(repository, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", str(width))
    assert not done.returncode, done.stderr


@pytest.mark.nightly
def test_both_sides_are_run_and_the_change_decides(tmp_path: Path) -> None:
    """A weight of 1 GiB before, and one of 4 GiB after, with a gradient of as much."""
    run(tmp_path, "git", "init", "-q")
    commit(tmp_path, 1 << 14)
    commit(tmp_path, 1 << 15)
    script, summary = ROOT / "action" / "compare.sh", tmp_path / "summary.md"
    done = run(tmp_path, script, "HEAD~1", summary, "--gpu-vram", "6", "train.py")
    assert done.returncode == 3, done.stderr
    text = summary.read_text()
    assert text.startswith("### memprof: Does not fit\n") and "**Before and after**" in text
    assert "instead of 2.02 GiB" in text.partition("**Before and after**")[2]
    assert run(tmp_path, "git", "worktree", "list").stdout.count("\n") == 1


@pytest.mark.nightly
def test_a_base_that_is_not_there_is_said(tmp_path: Path) -> None:
    run(tmp_path, "git", "init", "-q")
    commit(tmp_path, 64)
    done = run(tmp_path, ROOT / "action" / "compare.sh", "nowhere", "summary.md", "--gpu-vram", "6", "train.py")
    assert done.returncode == 0, done.stderr
    assert "There is nothing to compare with: nowhere" in (tmp_path / "summary.md").read_text()


def test_the_action_runs_the_script() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    step, _ = action["runs"]["steps"]
    assert "/action/compare.sh " in step["run"] and set(action["inputs"]) == {"command", "comment"}
