"""The release script refuses what is no release, and builds what is one; it uploads nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.version import __version__
from tests.processes import ROOT

pytestmark = pytest.mark.nightly


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what is built, in one commit."""
    for name in ("memprof", "docs", "recipes", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "README.md",
        "LICENSE",
        "CONTRIBUTING.md",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        ".gitignore",
    ):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased\n\n## {__version__} (2026-01-01)\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=memprof", "-c", "user.email=memprof@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")


def release(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([".ci/release"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_release_is_built(checkout: Path) -> None:
    done = release(checkout)
    assert done.returncode == 0, done.stderr
    built = sorted(path.name for path in (checkout / "dist").iterdir())
    assert built == [f"torch_memprof-{__version__}-py3-none-any.whl", f"torch_memprof-{__version__}.tar.gz"]
    assert f"git tag -a v{__version__}" in done.stdout


def test_what_is_no_release(checkout: Path) -> None:
    git(checkout, "tag", f"v{__version__}")
    assert "exists" in release(checkout).stderr
    (checkout / "CHANGELOG.md").write_text("# Changelog\n")
    assert "no section" in release(checkout).stderr
    (checkout / "CHANGELOG.md").write_text(f"## {__version__} (2026-01-01)\n")
    done = release(checkout)
    assert done.returncode == 1 and "not committed" in done.stderr and not (checkout / "dist").exists()
