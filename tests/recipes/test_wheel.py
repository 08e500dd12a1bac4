"""From an installed wheel, without the checkout: the recipes are there, copies of them run."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel was unpacked, as pip does."""
    for package in ("hatchling", "pip"):
        try:  # not find_spec, by which setuptools would replace distutils when it is requested pip
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".pyc")]
    target = folder / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    return target


def run(installed, folder, *arguments):
    """In an empty folder, with the wheel's memprof before any other."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheel_has_the_recipes_and_pages(installed, tmp_path):
    where = run(installed, tmp_path, "-c", "import memprof; print(memprof.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(installed)
    shown = run(installed, tmp_path, "-m", "memprof", "help", "lengths")
    assert shown.stdout == (ROOT / "docs" / "lengths.md").read_text(encoding="utf-8")
    listed = run(installed, tmp_path, "-m", "memprof", "recipes", "ls")
    assert listed.returncode == 0, listed.stderr
    names = [line for line in listed.stdout.splitlines() if not line.startswith(" ")]
    assert names == sorted(path.parent.name for path in (ROOT / "recipes").glob("*/run.py"))


@pytest.mark.nightly
def test_a_recipe_runs_from_the_wheel(installed, tmp_path):
    """And its copy, alike; in every run tests/recipes runs it from the checkout, and a copy is seen to be whole."""
    copied = run(installed, tmp_path, "-m", "memprof", "recipes", "cp", "4", "copy")
    assert copied.returncode == 0, copied.stderr
    from_copy = run(installed, tmp_path, "copy/run.py", "--no-clock")
    assert from_copy.returncode == 0, from_copy.stderr
    page = " ".join((ROOT / "docs/case-studies/4-npt-high-num-ranks.md").read_text(encoding="utf-8").split())
    printed = [" ".join(line.split()) for line in from_copy.stdout.splitlines() if line]
    assert len(printed) > 10 and not [line for line in printed if line not in page]
    from_wheel = run(installed, tmp_path, "-m", "memprof", "recipes", "run", "4", "--no-clock")
    assert from_copy.stdout == from_wheel.stdout != ""


@pytest.mark.nightly
def test_every_copy_is_whole(installed, tmp_path):
    """A copy imports nothing beside it but memprof: --help imports all of a script's files and stops."""
    assert run(installed, tmp_path, "-m", "memprof", "recipes", "cp", 5, "copy").returncode == 0
    done = run(installed, tmp_path, "copy/run.py", "--help")
    assert done.returncode == 0, done.stderr
